// The engine: its memory, its queue, a minute of tokens, and what has happened.

import { $, bytes, h, number, seconds, time, write } from "./dom.js";
import { inLanguage, t } from "./texts.js";

const MINUTE_MS = 60_000;
const GAP_MS = 3000; // a longer gap: the page was hidden
const KEPT = 50;
const WIDTH = 600;
const HEIGHT = 80;

let engine = { up: true };
let pace = []; // [ms since the epoch, tokens a second]
let journal = [];

export function startEngine() {
  inLanguage(() => {
    showEngine();
    showJournal();
  });
}

export function updateEngine(message) {
  if (message.whole) [pace, journal] = [[], []];
  engine = message.engine;
  pace.push(...(message.pace ?? []));
  pace = pace.filter(([at]) => at > pace.at(-1)[0] - MINUTE_MS);
  journal = [...message.journal.reverse(), ...journal].slice(0, KEPT);
  if (message.whole || message.journal.length) showJournal();
  showEngine();
}

function showEngine() {
  const budget = $("#budget");
  if (!engine.up) budget.replaceChildren(h("p", { className: "reason" }, t("down")));
  else if (engine.budget_bytes) showBudget(budget);
  const now = pace.at(-1)?.[1] ?? 0;
  const figures = [["rows", engine.rows], ["queue", engine.waiting], ["now", now]];
  $("#figures").replaceChildren(
    ...figures.map(([name, value]) => h("div", {}, h("dt", {}, t(name)), h("dd", {}, number(value)))),
  );
  showPace(now);
}

function showBudget(element) {
  const { budget_bytes: total, weight_bytes: weights, kv_bytes: kv, prefix_bytes: kept } = engine;
  const parts = { weights, kv, kept, free: Math.max(total - weights - kv - kept, 0) };
  const texts = Object.fromEntries(Object.entries({ total, ...parts }).map(([k, v]) => [k, bytes(v)]));
  const bar = h("div", { className: "bar", role: "img", aria: { label: t("budget", texts) } });
  const key = h("p", { className: "key" });
  for (const [name, size] of Object.entries(parts)) {
    const part = h("span", { data: { part: name } });
    part.style.flexGrow = size / total;
    bar.append(part);
    key.append(h("span", { data: { part: name } }, `${t(name)} ${texts[name]}`), " ");
  }
  element.replaceChildren(bar, key);
}

function showPace(now) {
  const most = Math.max(1, ...pace.map(([, value]) => value));
  const end = pace.at(-1)?.[0] ?? 0;
  const x = (at) => WIDTH - ((end - at) / MINUTE_MS) * WIDTH;
  const y = (value) => HEIGHT - 2 - (value / most) * (HEIGHT - 6);
  const isGap = (i) => i === 0 || pace[i][0] - pace[i - 1][0] > GAP_MS;
  const step = ([at, value], i) => `${isGap(i) ? "M" : "L"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
  const svg = (tag, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const name in attributes) made.setAttribute(name, attributes[name]);
    return made;
  };
  const label = t("pace_of", { now: number(now), most: number(pace.length ? most : 0) });
  const picture = svg("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label,
  });
  picture.append(svg("path", { d: pace.map(step).join("") }));
  $("#chart").replaceChildren(picture, h("small", { aria: { hidden: true } }, number(most)));
}

function showJournal() {
  const sentence = ({ event, model, seconds: took, reason }) =>
    t(`was_${event}`, { model, seconds: seconds(took), reason });
  $("#journal").replaceChildren(
    ...journal.map((entry) =>
      h("li", { data: { event: entry.event } }, h("time", {}, time(entry.at_ms)), " ", sentence(entry)),
    ),
    ...(journal.length ? [] : [h("li", {}, t("quiet"))]),
  );
}
