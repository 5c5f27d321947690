// The table of the store's models.

import { load, pin, Refused, unload } from "./api.js";
import { $, ago, bytes, h, number, seconds, write } from "./dom.js";
import { canChoose, chosen, onChosen, toggle } from "./prompt.js";
import { inLanguage, t } from "./texts.js";

const COLUMNS = [
  "compare", "name", "state", "size", "memory", "requests", "tokens_s", "first_token_s", "last_used", "actions",
];
const BUSY = ["fetching", "loading", "draining"];

const rows = new Map(); // what the server says, by name
const shown = new Map(); // the same as elements
let store = { listed: false, error: "" };

export const rowOf = (name) => rows.get(name);

export function startModels() {
  const filter = $("#filter");
  filter.addEventListener("input", show);
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !event.target.closest("input, textarea, select, dialog")) {
      event.preventDefault();
      filter.focus();
    }
  });
  onChosen(show);
  inLanguage(() => {
    $("#models thead tr").replaceChildren(
      ...COLUMNS.map((name) => h("th", { scope: "col", role: "columnheader" }, t(name))),
    );
    for (const row of shown.values()) row.element.remove();
    shown.clear();
    show();
  });
}

export function updateModels(message) {
  if (message.whole) rows.clear();
  for (const [name, row] of Object.entries(message.models)) {
    if (row) rows.set(name, row);
    else rows.delete(name);
  }
  store = message.store;
  if (message.whole && !chosen.length) {
    const isReady = (name) => rows.get(name).state === "ready";
    for (const name of sorted().sort((a, b) => isReady(b) - isReady(a)).slice(0, 2)) toggle(name);
  }
  show();
}

const sorted = () => [...rows.keys()].sort((a, b) => a.localeCompare(b, "ko"));

/** Which base a model shares, or why it shares none. */
function sharing({ base, is_adapter, whole_because }) {
  if (base) return t(is_adapter ? "adapter_of" : "delta_of", { base });
  return whole_because ? t("whole_because", { reason: whole_because }) : "";
}

function show() {
  const wanted = $("#filter").value.trim().normalize("NFC").toLowerCase();
  const names = sorted().filter((name) => name.toLowerCase().includes(wanted));
  const body = $("#models tbody");
  for (const [name, row] of shown) {
    if (!names.includes(name)) {
      row.element.remove();
      shown.delete(name);
    }
  }
  names.forEach((name, i) => {
    if (!shown.has(name)) shown.set(name, new Row(name));
    const row = shown.get(name);
    if (body.children[i] !== row.element) body.insertBefore(row.element, body.children[i] ?? null);
    row.update(rows.get(name));
  });
  const loaded = [...rows.values()].filter((row) => row.state === "ready").length;
  write($("#count"), t("counted", { loaded, all: rows.size }));
  const nothing = $("#nothing");
  nothing.hidden = names.length > 0;
  write(nothing, store.error || t(rows.size ? "no_match" : store.listed ? "empty" : "listing"));
}

class Row {
  constructor(name) {
    this.name = name;
    this.choice = h("input", { type: "checkbox", aria: { label: `${t("compare")}: ${name}` }, change: () => toggle(name) });
    this.state = h("span", { className: "state" });
    this.aliases = h("small", { className: "base" });
    this.reason = h("small", { className: "reason" });
    this.base = h("small", { className: "base" });
    this.mover = h("button", { type: "button", click: () => this.act(this.isLoaded ? unload : load) });
    this.pinner = h("button", { type: "button", title: t("pin_tip"), click: () => this.act((n) => pin(n, !this.row.pinned)) }, t("pin"));
    this.pinner.setAttribute("aria-label", `${t("pin")}: ${name}`);
    this.cells = Object.fromEntries(
      COLUMNS.map((column) => [column, h("td", { role: "cell", data: { column, label: t(column) } })]),
    );
    this.cells.compare.append(this.choice);
    this.cells.name.append(h("strong", {}, name), this.base, this.aliases, this.reason);
    this.cells.state.append(this.state);
    this.cells.actions.append(this.mover, " ", this.pinner);
    this.element = h("tr", { role: "row", data: { model: name } }, ...Object.values(this.cells));
  }

  get isLoaded() {
    return ["ready", ...BUSY].includes(this.row.state);
  }

  update(row) {
    this.row = row;
    const { state, residency } = row;
    this.element.dataset.state = state;
    this.choice.checked = chosen.includes(this.name);
    this.choice.disabled = !this.choice.checked && !canChoose();
    write(this.state, state === "ready" && residency ? `${t(state)} · ${t(residency)}` : t(state));
    write(this.reason, row.reason ?? "");
    write(this.base, [row.task && t(row.task), sharing(row)].filter(Boolean).join(" · "));
    write(this.aliases, row.aliases ? t("alias_is", { names: row.aliases.join(", ") }) : "");
    const notes = [number(row.requests, 0)];
    if (row.in_flight) notes.push(t("in_flight", { count: row.in_flight }));
    if (row.errors) notes.push(t("errors", { count: row.errors }));
    write(this.cells.size, bytes(row.size_bytes));
    write(this.cells.memory, bytes(row.held_bytes));
    write(this.cells.requests, notes.join(" · "));
    write(this.cells.tokens_s, row.tokens_s ? number(row.tokens_s) : "–");
    write(this.cells.first_token_s, seconds(row.first_token_s));
    write(this.cells.last_used, ago(row.last_ms));
    write(this.mover, t(this.isLoaded ? "unload" : "load"));
    this.mover.setAttribute("aria-label", `${this.mover.textContent}: ${this.name}`);
    this.mover.disabled = this.isActing || state === "draining";
    this.pinner.disabled = this.isActing || state !== "ready";
    this.pinner.setAttribute("aria-pressed", Boolean(row.pinned));
  }

  /** The buttons come back with what the server says next. */
  async act(what) {
    this.isActing = true;
    this.update(this.row);
    try {
      await what(this.name);
      write($("#trouble"), "");
    } catch (error) {
      write($("#trouble"), `${this.name}: ${error instanceof Refused ? error.message : t("broken")}`);
    }
    this.isActing = false;
  }
}
