// Small things that several views show.
import { h, button, note } from "./dom.js";
import { S } from "./strings.js";

export const parameters = () => new URLSearchParams(window.location.search);

/** Where a link of ours leads: a view, in the tab of Airflow that one is in. */
export function place(view, more = {}) {
  const search = new URLSearchParams({ view });
  const tab = parameters().get("tab");
  if (tab) search.set("tab", tab);
  for (const [name, value] of Object.entries(more)) {
    for (const one of [value].flat()) if (one !== null && one !== undefined && one !== "") search.append(name, one);
  }
  return `?${search}`;
}

/** The same, in the ledger's own page: where a tab has no room for more. */
export const inLedger = (view, more) => `plugin/runguard${window.location.pathname}${place(view, more).replace(/&tab=[^&]*/, "")}`;

export function badge(state) {
  return h("span", { class: `badge ${state}`, title: S.means[state] ?? "" }, S.state[state] ?? state);
}

export const className = (name) => (name ? S.failureClass[name] ?? name : S.none);

/** An amount, with the decimals that it has: 12.50 stays 12.50. */
export function money(amount, currency) {
  if (amount === null || amount === undefined) return S.none;
  return [currency, new Intl.NumberFormat(undefined, { minimumFractionDigits: decimals(amount) }).format(amount)].filter(Boolean).join(" ");
}

const decimals = (amount) => Math.min(20, amount.split(".")[1]?.length ?? 0);

/** What is at stake in all of them: currency and sum of each, nothing where it is zero. */
export function stake(lines) {
  const amounts = new Map();
  for (const one of lines) {
    if (one.currency && (one.amount ?? null) !== null) amounts.set(one.currency, [...(amounts.get(one.currency) ?? []), one.amount]);
  }
  return [...amounts].map(([currency, some]) => [currency, added(some)]).filter(([, sum]) => Number(sum));
}

/** The sum of amounts, exactly, with the decimals of the finest. */
function added(amounts) {
  const fine = Math.max(...amounts.map(decimals));
  const parts = amounts.map((amount) => BigInt(amount.replace(".", "") + "0".repeat(fine - decimals(amount))));
  const text = parts.reduce((sum, part) => sum + part, 0n).toString();
  const [sign, digits] = text.startsWith("-") ? ["-", text.slice(1)] : ["", text];
  const whole = digits.padStart(fine + 1, "0");
  return `${sign}${whole.slice(0, whole.length - fine)}${fine ? `.${whole.slice(-fine)}` : ""}`;
}

export const count = (number, more = false) => `${more ? `${S.more} ` : ""}${number.toLocaleString()}`;

export function copyable(text) {
  if (!text) return S.none;
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = h("textarea", { class: "offscreen", value: text });
      document.body.append(area);
      area.select();
      document.execCommand("copy"); // where the page is not served by https
      area.remove();
    }
    note(S.copied);
  };
  return h("span", { class: "copyable" }, h("code", { title: text }, text), button(S.copy, copy, { class: "plain", "aria-label": `${S.copy} ${text}` }));
}

export function task(record) {
  if (!record.dag_id) return S.none;
  const map = record.map_index >= 0 ? `[${record.map_index}]` : "";
  return `${record.dag_id}.${record.task_id}${map}`;
}

export function instance(record) {
  const map = record.map_index >= 0 ? `/mapped/${record.map_index}` : "";
  const parts = [record.dag_id, record.run_id, record.task_id].map(encodeURIComponent);
  return `dags/${parts[0]}/runs/${parts[1]}/tasks/${parts[2]}${map}`;
}

export const json = (value) => h("pre", {}, JSON.stringify(value, null, 2));
