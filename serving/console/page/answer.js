// One model's answer: its text while it is made, how fast, and what else each token might have been.

import { events, request } from "./api.js";
import { call, tokensOf } from "./calls.js";
import { showCode } from "./dialogs.js";
import { h, number, percent, seconds, write } from "./dom.js";
import { snippets } from "./snippets.js";
import { t } from "./texts.js";

// Underlines: the best of these that a token's probability reaches.
const SHARES = [0.9, 0.5, 0.2, 0.05, 0];

export class Answer {
  /** `query` as for `call`; `isLoaded` says whether the first token waits for a load. */
  constructor(query, isLoaded) {
    this.query = query;
    this.isLoaded = isLoaded;
    this.ended = "";
    this.count = 0;
    this.sequences = [];
    this.picked = null;
    this.abort = new AbortController();
    this.numbers = h("p", { className: "numbers" });
    this.text = h("div", {
      className: "text",
      tabIndex: 0,
      role: "group",
      aria: { label: query.model },
      click: (event) => this.pick(event.target.closest(".token")),
      keydown: (event) => this.move(event),
    });
    this.detail = h("p", { className: "detail", role: "status" });
    this.stopper = h("button", { type: "button", click: () => this.stop() });
    this.copier = h("button", { type: "button", click: () => showCode(query.model, snippets(query)) });
    this.element = h(
      "article",
      { className: "answer", data: { model: query.model, state: "waiting" } },
      h("h3", {}, query.model),
      this.numbers,
      this.text,
      this.detail,
      h("div", { className: "actions" }, this.stopper, this.copier),
    );
    this.describe();
  }

  /** Until the end of the answer, which may be an error: it is shown, not thrown. */
  async run() {
    this.started = performance.now();
    try {
      const { path, body } = call(this.query);
      const response = await request("call", path, {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify(body),
        signal: this.abort.signal,
      });
      await this.read(response);
      this.end(this.ended || "broken");
    } catch (error) {
      if (error.name === "AbortError") this.end("stopped");
      else this.fail(error instanceof TypeError ? t("broken") : error.message);
    }
  }

  async read(response) {
    if (!response.headers.get("content-type")?.startsWith("text/event-stream")) {
      this.whole(await response.text());
      return;
    }
    for await (const event of events(response))
      for (const token of tokensOf(event)) this.take(token);
  }

  /** An answer that is no stream, of a classifier or of a model that is a script. */
  whole(text) {
    let shown = text;
    try {
      const value = JSON.parse(text);
      shown = value.generated_text ?? text;
      if (Array.isArray(value) && value.every((entry) => entry.score != null)) return this.labels(value);
    } catch {
      // as it is
    }
    this.arrived();
    this.sequence(0).append(shown);
    this.ended = "finish_stop";
  }

  /** Labels with bars; those of tokens with the words that have them. */
  labels(entries) {
    this.arrived();
    this.isLabeled = true;
    const shown = ({ label, entity, entity_group, word, score }) => {
      const share = score >= 0 && score <= 1;
      return h(
        "p",
        { className: "label", lang: "ko" },
        h("span", {}, word ? `${word} · ${entity_group ?? entity}` : label),
        ...(share ? [h("meter", { min: 0, max: 1, value: score, aria: { hidden: true } })] : []),
        h("span", { className: "score" }, share ? percent(score) : number(score)),
      );
    };
    this.text.append(...entries.map(shown), ...(entries.length ? [] : [h("p", {}, t("no_entities"))]));
    this.ended = "labeled";
  }

  take({ index, text, isToken, step, prefill, end }) {
    const sequence = this.sequence(index);
    for (const token of prefill ?? []) sequence.append(piece(token.text, token, "token given"));
    if (end) this.ended = `finish_${end}`;
    if (isToken) this.arrived();
    if (text) sequence.append(piece(text, step, "token"));
    this.describe();
  }

  arrived() {
    this.count++;
    this.last = performance.now();
    this.first ??= this.last;
    this.element.dataset.state = "running";
  }

  sequence(index) {
    if (!this.sequences[index]) {
      const made = h("p", { lang: "ko" });
      const { parameters, prompt } = this.query;
      if (parameters.num_return_sequences > 1)
        made.append(h("small", { lang: "" }, t("sequence", { number: index + 1 })), " ");
      if (parameters.return_full_text && !parameters.decoder_input_details && !this.query.chat)
        made.append(h("span", { className: "given" }, prompt));
      this.sequences[index] = made;
      this.text.append(made);
    }
    return this.sequences[index];
  }

  stop() {
    this.abort.abort();
  }

  end(how) {
    this.ended = how;
    this.element.dataset.state = "done";
    this.describe();
  }

  fail(message) {
    this.element.dataset.state = "failed";
    this.ended = "failed";
    this.text.append(h("p", { className: "reason" }, message));
    this.describe();
  }

  get isRunning() {
    return ["waiting", "running"].includes(this.element.dataset.state);
  }

  get tokensPerSecond() {
    return this.count > 1 ? ((this.count - 1) / (this.last - this.first)) * 1000 : null;
  }

  /** Writes what is in words and numbers, in the page's language. */
  describe() {
    const facts = [];
    if (this.first) {
      const load = this.isLoaded ? "" : ` (${t("with_load")})`;
      const took = `${seconds((this.first - this.started) / 1000)}${load}`;
      facts.push(this.isLabeled ? took : `${t("first_token")} ${took}`);
      if (this.tokensPerSecond) facts.push(`${number(this.tokensPerSecond)} ${t("tokens_s")}`);
      if (!this.isLabeled) facts.push(`${this.count} ${t("tokens")}`);
    } else if (!this.ended) {
      facts.push(t(this.isLoaded ? "waiting" : "loading_first"));
    }
    if (!this.isRunning) facts.push(t(this.ended));
    write(this.numbers, facts.join(" · "));
    write(this.stopper, t("stop"));
    write(this.copier, t("copy_as"));
    this.stopper.disabled = !this.isRunning;
  }

  // Tokens

  move(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1 };
    if (!(event.key in steps)) return;
    const all = [...this.text.querySelectorAll("[data-share]")];
    const at = all.indexOf(this.picked) + steps[event.key];
    event.preventDefault();
    this.pick(all[Math.max(0, Math.min(at, all.length - 1))]);
  }

  pick(token) {
    if (!token?.step) return; // the first token of a prompt has no probability
    this.picked?.classList.remove("picked");
    this.picked = token;
    token.classList.add("picked");
    const shown = ({ text, logprob }) =>
      t("alternative", { text: JSON.stringify(text), share: percent(Math.exp(logprob)) });
    const own = { text: token.textContent, logprob: token.step.logprob };
    const others = (token.step.top ?? []).filter((other) => other.logprob !== own.logprob);
    write(this.detail, [own, ...others].map(shown).join(" · "));
  }
}

/** A token's text; its underline says how likely it was. */
function piece(text, step, className) {
  const made = h("span", { className }, text);
  if (step?.logprob != null) {
    made.step = step;
    made.dataset.share = SHARES.findIndex((share) => Math.exp(step.logprob) >= share);
  }
  return made;
}

/** What the underlines mean. */
export function showLegend(element) {
  const shown = (share, i) => h("span", { className: "token", data: { share: i } }, share ? `≥ ${share * 100} %` : "< 5 %");
  element.replaceChildren(t("legend"), ...SHARES.flatMap((share, i) => [" ", shown(share, i)]), " · ", t("pick"));
}
