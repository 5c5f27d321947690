// The generation parameters: their fields, and what of them a request holds.

import { $, h } from "./dom.js";
import { inLanguage, t } from "./texts.js";

// name, what an empty field stands for unless the model says otherwise, limits of a number
const NUMBERS = [
  ["max_new_tokens", 64, { min: 1, step: 1 }],
  ["temperature", 1, { min: 0, max: 100, step: "any" }],
  ["top_k", 0, { min: 0, step: 1 }],
  ["top_p", 1, { min: 0.01, max: 1, step: "any" }],
  ["typical_p", 1, { min: 0.01, max: 1, step: "any" }],
  ["seed", "", { min: 0, step: 1 }],
  ["repetition_penalty", 1, { min: 0.01, max: 100, step: "any" }],
  ["frequency_penalty", 0, { min: -2, max: 2, step: "any" }],
  ["presence_penalty", 0, { min: -2, max: 2, step: "any" }],
  ["no_repeat_ngram_size", 0, { min: 0, step: 1 }],
  ["dry_multiplier", 0, { min: 0, max: 100, step: "any" }],
  ["min_new_tokens", 0, { min: 0, step: 1 }],
  ["num_return_sequences", 1, { min: 1, max: 16, step: 1 }],
  ["logprobs", "", { min: 0, max: 20, step: 1, value: 3 }],
];
const TEXTS = ["stop", "bad_words"]; // one a line
export const FORMS = ["choice", "regex", "json_schema", "grammar"];
const FLAGS = ["return_full_text", "decoder_input_details"];

const fields = {};

export function showParameters() {
  const add = (name, field) => {
    fields[name] = field;
    field.id = `parameter-${name}`;
    return h("div", {}, h("label", { htmlFor: field.id }, h("code", {}, name)), field);
  };
  const option = (value, text) => h("option", { value }, text);
  $("#parameters .grid").append(
    ...NUMBERS.map(([name, usual, limits]) =>
      add(name, h("input", { type: "number", placeholder: usual, inputMode: "decimal", ...limits })),
    ),
    add("do_sample", h("select", {}, option("", ""), option("true", "true"), option("false", "false"))),
    ...TEXTS.map((name) => add(name, h("textarea", { rows: 2, placeholder: "\\n" }))),
    add("logit_bias", h("input", { placeholder: '{"389": -100}', spellcheck: false })),
    add("form", h("select", {}, ...["", ...FORMS].map((name) => option(name, name)))),
    add("form_text", h("textarea", { rows: 2, spellcheck: false })),
    ...FLAGS.map((name) => add(name, h("input", { type: "checkbox" }))),
  );
  inLanguage(() => {
    for (const [name] of NUMBERS) fields[name].title = t("unset");
    fields.form_text.placeholder = t("form");
  });
}

/** What is wrong with a field, in words for its user. */
export class Wrong extends Error {}

/** The parameters that are set, by the names of `/predictions`. Throws `Wrong`. */
export function readParameters() {
  const found = {};
  for (const [name] of NUMBERS) {
    const field = fields[name];
    if (field.validity.badInput) throw wrong(name, "not_number");
    if (field.value !== "") found[name] = field.valueAsNumber;
  }
  if (fields.do_sample.value) found.do_sample = fields.do_sample.value === "true";
  const lines = (name) => fields[name].value.split("\n").filter(Boolean);
  for (const name of TEXTS) {
    const texts = lines(name);
    if (texts.length) found[name] = texts.map((text) => text.replaceAll("\\n", "\n"));
  }
  if (fields.logit_bias.value.trim()) found.logit_bias = object("logit_bias");
  const form = fields.form.value;
  if (form) found[form] = form === "choice" ? lines("form_text") : fields.form_text.value;
  for (const name of FLAGS) if (fields[name].checked) found[name] = true;
  return found;
}

function object(name) {
  try {
    const value = JSON.parse(fields[name].value);
    if (value && typeof value === "object" && !Array.isArray(value)) return value;
  } catch {
    // refused below
  }
  throw wrong(name, "not_json");
}

const wrong = (field, why) => new Wrong(t("not_sent", { field, why: t(why) }));
