// Elements, and numbers for people.

import { currentLanguage } from "./texts.js";

export const $ = (selector, from = document) => from.querySelector(selector);

/** An element. Of `properties`, functions are listeners, `data` and `aria` attributes of that
 *  kind; children are elements or texts. */
export function h(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (name === "data") Object.assign(made.dataset, value);
    else if (name === "aria") for (const key in value) made.setAttribute(`aria-${key}`, value[key]);
    else if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** Sets an element's text where it differs, so that what stays the same can stay selected. */
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(count) {
  if (count == null) return "–";
  const power = count < 1 ? 0 : Math.min(Math.floor(Math.log2(count) / 10), UNITS.length - 1);
  return `${number(count / 1024 ** power, power && 3)} ${UNITS[power]}`;
}

/** With so many significant digits; 0: all of a whole number. */
export function number(value, digits = 3) {
  if (value == null) return "–";
  const format = digits ? { maximumSignificantDigits: Math.max(digits, `${Math.round(value)}`.length) } : {};
  return value.toLocaleString(currentLanguage(), format);
}

export function seconds(value) {
  if (value == null) return "–";
  if (value < 1) return `${number(value * 1000, 3)} ms`;
  if (value < 120) return `${number(value, 3)} s`;
  return `${number(value / 60, 3)} min`;
}

export const percent = (share) => `${number(share * 100, share < 0.1 ? 2 : 3)} %`;

export const time = (ms) => new Date(ms).toTimeString().slice(0, 8);

/** How long ago, to the unit that matters. */
export function ago(ms, now = Date.now()) {
  if (!ms) return "–";
  const past = Math.max((now - ms) / 1000, 0);
  const format = new Intl.RelativeTimeFormat(currentLanguage(), { numeric: "auto", style: "narrow" });
  if (past < 60) return format.format(-Math.floor(past), "second");
  if (past < 3600) return format.format(-Math.floor(past / 60), "minute");
  if (past < 86400) return format.format(-Math.floor(past / 3600), "hour");
  return format.format(-Math.floor(past / 86400), "day");
}
