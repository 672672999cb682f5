// Times as people read them: how long ago or ahead, and the moment itself in the time zone that is set in Airflow.
import { h } from "./dom.js";
import { S } from "./strings.js";

let ahead = 0; // of this machine's clock; only the ledger's counts

export function setNow(text) {
  if (text) ahead = Date.parse(text) - Date.now();
}
export const now = () => Date.now() + ahead;

function zone() {
  try {
    return JSON.parse(window.parent.localStorage.getItem("timezone")) || undefined;
  } catch {
    return undefined;
  }
}

let format;
function formatter() {
  const options = { dateStyle: "short", timeStyle: "medium" };
  try {
    format ??= new Intl.DateTimeFormat("sv-SE", { ...options, timeZone: zone() }); // 2026-11-30 16:02:10, as Airflow has it
  } catch {
    format ??= new Intl.DateTimeFormat("sv-SE", options);
  }
  return format;
}
export const absolute = (text) => formatter().format(new Date(text));
export const zoneName = () => formatter().resolvedOptions().timeZone;

const UNITS = [["s", 1, 100], ["min", 60, 6_000], ["h", 3_600, 172_800], ["d", 86_400, Infinity]];

export function span(seconds) {
  const [unit, length] = UNITS.find(([, , limit]) => Math.abs(seconds) < limit);
  return `${Math.round(Math.abs(seconds) / length)} ${unit}`;
}

export function relative(text) {
  const seconds = (now() - Date.parse(text)) / 1000;
  if (Math.abs(seconds) < 1) return "now";
  return seconds > 0 ? `${span(seconds)} ago` : `in ${span(seconds)}`;
}

function said(text, [before, after] = ["", ""]) {
  return `${now() < Date.parse(text) ? before : after} ${relative(text)}`.trim();
}

/** A moment: relative, with the absolute time beside it (`both`) or on hover; `words` = what to say before it and after. */
export function time(text, { both = false, words } = {}) {
  if (!text) return S.none;
  const shown = h("time", { datetime: text, title: `${absolute(text)} (${zoneName()})`, dataset: { live: words?.join("|") ?? "|" } }, said(text, words));
  return both ? h("span", { class: "moment" }, shown, " ", h("span", { class: "muted" }, absolute(text))) : shown;
}

/** A sentence of the API, which is also the command line's, with its moments in the reader's time zone. */
export const localised = (sentence) =>
  sentence
    .replace(/\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ(?= \((?:now|in \d+ \w+|\d+ \w+ ago)\))/g, absolute)
    .replace(/(?<=, since )(\d{4}-\d\d-\d\d) (\d\d:\d\d:\d\d) UTC/g, (_, day, hour) => absolute(`${day}T${hour}Z`));

setInterval(() => {
  for (const shown of document.querySelectorAll("time[data-live]")) {
    const text = said(shown.dateTime, shown.dataset.live.split("|"));
    if (shown.textContent !== text) shown.textContent = text;
  }
}, 1_000);
