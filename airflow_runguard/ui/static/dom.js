// Elements from data. Text is always a text node, so that nothing in the ledger can become markup.
import { S } from "./strings.js";

export function h(tag, properties = {}, ...children) {
  const svg = ["svg", "rect", "g", "line", "title", "text", "path"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "selected") element[name] = value;
    else if (name === "dataset") Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const button = (text, click, properties = {}) => h("button", { type: "button", onclick: click, ...properties }, text);

export function note(text, kind = "") {
  const place = document.getElementById("notes");
  const shown = h("p", { class: `note ${kind}` }, text, button("×", () => shown.remove(), { class: "plain", "aria-label": S.close }));
  place.append(shown);
  setTimeout(() => shown.remove(), kind === "bad" ? 30_000 : 8_000);
}

export function section(title, ...content) {
  return h("section", {}, h("h2", {}, title), ...content);
}

export function empty(title, todo, ...more) {
  return h("div", { class: "empty" }, h("p", {}, h("strong", {}, title)), todo ? h("p", {}, todo) : null, ...more);
}
