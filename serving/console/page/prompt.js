// The prompt, the models that get it, and their answers side by side.

import { Answer, showLegend } from "./answer.js";
import { $, h, write } from "./dom.js";
import { readParameters, showParameters, Wrong } from "./parameters.js";
import { inLanguage, t } from "./texts.js";

const MOST = 4;

/** The names of the models that answer, in the order in which they were chosen. */
export const chosen = [];
export const canChoose = () => chosen.length < MOST;

const listeners = [];
export const onChosen = (listener) => listeners.push(listener);

export function toggle(name) {
  const at = chosen.indexOf(name);
  if (at >= 0) chosen.splice(at, 1);
  else if (canChoose()) chosen.push(name);
  showChosen();
  for (const listener of listeners) listener();
}

let answers = [];

/** `rowOf(name)` is what is known of a model. */
export function startPrompt(rowOf) {
  showParameters();
  $("#prompt").value = t("first_prompt");
  $("#form").addEventListener("submit", (event) => {
    event.preventDefault();
    run(rowOf);
  });
  $("#stop").addEventListener("click", stop);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && event.target.form === $("#form")) {
      event.preventDefault();
      $("#form").requestSubmit();
    }
    if (event.key === "Escape" && !$("dialog")) stop();
  });
  inLanguage(() => {
    showChosen();
    showLegend($("#legend"));
    for (const answer of answers) answer.describe();
  });
}

function showChosen() {
  const label = (name) => t("remove", { name });
  $("#chosen").replaceChildren(
    ...chosen.map((name) =>
      h("button", { type: "button", className: "chip", title: label(name), aria: { label: label(name) }, click: () => remove(name) }, name, " ✕"),
    ),
    ...(chosen.length ? [] : [h("small", {}, t("choose"))]),
  );
}

function remove(name) {
  toggle(name);
  ($("#chosen button") ?? $("#prompt")).focus();
}

const stop = () => answers.forEach((answer) => answer.stop());

async function run(rowOf) {
  stop();
  const problem = $("#problem");
  write(problem, "");
  let parameters;
  try {
    if (!chosen.length) throw new Wrong(t("no_models"));
    parameters = readParameters();
  } catch (error) {
    if (!(error instanceof Wrong)) throw error;
    write(problem, error.message);
    return;
  }
  const prompt = $("#prompt").value;
  const chat = $("#chat").checked;
  const made = (answers = chosen.map((model) => {
    const row = rowOf(model);
    const stream = chat || row?.in_engine !== false;
    return new Answer({ model, prompt, parameters, chat, stream, task: row?.task }, row?.state === "ready");
  }));
  $("#answers").replaceChildren(...made.map((answer) => answer.element));
  $("#legend").hidden = parameters.logprobs == null;
  $("#stop").disabled = false;
  await Promise.all(
    made.map(async (answer) => {
      await answer.run();
      const text = answer.text.textContent;
      if (answers === made) write($("#announcement"), t("answered", { name: answer.query.model, text }));
    }),
  );
  if (answers === made) $("#stop").disabled = true;
}
