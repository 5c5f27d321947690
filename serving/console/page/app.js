// The page: its words, its theme, and the feed that keeps it up to date.

import { follow, tokens } from "./api.js";
import { askToken } from "./dialogs.js";
import { $, write } from "./dom.js";
import { startEngine, updateEngine } from "./engine.js";
import { rowOf, startModels, updateModels } from "./models.js";
import { startPrompt } from "./prompt.js";
import { currentLanguage, inLanguage, switchLanguage, t } from "./texts.js";

const THEMES = ["auto", "light", "dark"];
let theme = localStorage.getItem("theme") ?? "auto";

function showTheme() {
  document.documentElement.dataset.theme = theme;
  write($("#theme"), t(`theme_${theme}`));
}

function showState(state = $("#connection").dataset.state) {
  $("#connection").dataset.state = state;
  write($("#connection"), t(state));
}

inLanguage(() => {
  document.documentElement.lang = currentLanguage();
  for (const element of document.querySelectorAll("[data-text]")) write(element, t(element.dataset.text));
  for (const element of document.querySelectorAll("[data-label]:not(td)")) {
    element.ariaLabel = element.placeholder = t(element.dataset.label);
  }
  write($("#language"), currentLanguage() === "ko" ? "English" : "한국어");
  $("#language").lang = currentLanguage() === "ko" ? "en" : "ko";
  showTheme();
  showState();
});
$("#language").addEventListener("click", switchLanguage);
$("#theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  localStorage.setItem("theme", theme);
  showTheme();
});
$("#token").addEventListener("click", () => askToken(tokens));
startPrompt(rowOf);
startModels();
startEngine();
follow((message) => {
  updateModels(message);
  updateEngine(message);
}, showState);
