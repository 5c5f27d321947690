// Dialogs above the page: the token, and code to copy.

import { $, h } from "./dom.js";
import { t } from "./texts.js";

let asking = null; // one dialog for all requests that were refused meanwhile

/** Puts what the user gives into `tokens`, and tells the document; false if it is not given. */
export function askToken(tokens, kind = "look", wasSent = false) {
  asking ??= ask(tokens, kind, wasSent).finally(() => (asking = null));
  return asking;
}

function ask(tokens, kind, wasSent) {
  const field = (name) =>
    h("input", { type: "password", autocomplete: "off", id: `token-${name}`, value: tokens[name] });
  const fields = { call: field("call"), manage: field("manage") };
  const label = (name) => h("label", { htmlFor: `token-${name}` }, t(`token_${name}`));
  const dialog = h(
    "dialog",
    { id: "token-dialog", aria: { labelledby: "token-title" } },
    h("h2", { id: "token-title" }, t("token_title")),
    h("p", {}, t("token_why")),
    ...(wasSent ? [h("p", { className: "reason", role: "alert" }, t("token_wrong"))] : []),
    h(
      "form",
      { method: "dialog" },
      ...["call", "manage"].flatMap((name) => [label(name), fields[name]]),
      h(
        "div",
        { className: "actions" },
        h("button", { className: "main", value: "use" }, t("token_use")),
        h("button", { value: "", formNoValidate: true }, t("close")),
      ),
    ),
  );
  return shown(dialog, fields[kind] ?? fields.call, () => {
    if (dialog.returnValue !== "use") return false;
    for (const name in fields) tokens[name] = fields[name].value.trim();
    document.dispatchEvent(new Event("token"));
    return true;
  });
}

/** Shows `snippets`, code by the name of its language, to be copied. */
export function showCode(title, snippets) {
  const code = h("pre", { tabIndex: 0 }, h("code", { id: "code" }));
  const tabs = Object.keys(snippets).map((name) =>
    h("button", { type: "button", click: () => choose(name), data: { name } }, name),
  );
  const copy = h("button", { type: "button", className: "main", click: copyCode }, t("copy"));
  const dialog = h(
    "dialog",
    { id: "code-dialog", aria: { labelledby: "code-title" } },
    h("h2", { id: "code-title" }, title),
    h("div", { className: "actions" }, ...tabs),
    code,
    h(
      "form",
      { method: "dialog", className: "actions" },
      copy,
      h("button", {}, t("close")),
    ),
  );

  function choose(name) {
    code.firstChild.textContent = snippets[name];
    copy.textContent = t("copy");
    for (const tab of tabs) tab.setAttribute("aria-pressed", tab.dataset.name === name);
  }

  async function copyCode() {
    getSelection().selectAllChildren(code.firstChild);
    // Pages that came without TLS from another machine have no clipboard but this one.
    if (navigator.clipboard) await navigator.clipboard.writeText(code.textContent).catch(() => {});
    else document.execCommand("copy");
    copy.textContent = t("copied");
  }

  choose(tabs[0].dataset.name);
  return shown(dialog, copy, () => {});
}

function shown(dialog, focus, result) {
  const before = document.activeElement;
  $("body").append(dialog);
  dialog.showModal();
  focus.focus();
  return new Promise((done) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      before?.focus();
      done(result());
    });
  });
}
