// The API beside this page, and Airflow's own, with the cookie of whoever looks at it.
import { button, h } from "./dom.js";
import { S } from "./strings.js";

export const AIRFLOW = new URL("../../", window.location.href); // also under a prefix of [api] base_url

export class Refused extends Error {
  constructor(status, detail, remedy = "") {
    super(detail);
    this.status = status;
    this.remedy = remedy;
  }
}

export function query(parameters) {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "" && one !== false) search.append(name, one);
    }
  }
  const text = search.toString();
  return text ? `?${text}` : "";
}

export const get = (path, parameters = {}) => ask("GET", `../api/${path}${query(parameters)}`);
export const post = (path, body) => ask("POST", `../api/${path}`, body);
export const airflow = (method, path, body) => ask(method, new URL(`api/v2/${path}`, AIRFLOW), body);
export const exported = (parameters) => `../api/records/export${query(parameters)}`;

async function ask(method, url, body) {
  const headers = { Accept: "application/json", "X-Runguard-Request": "1" };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(url, { method, headers, body: body === undefined ? undefined : JSON.stringify(body), credentials: "same-origin" });
  } catch {
    throw new Refused(0, S.offline);
  }
  const data = await answer.json().catch(() => ({}));
  if (answer.ok) return data;
  if (answer.status === 401) expired();
  const detail = typeof data.detail === "string" ? data.detail : `${S.failed} (${answer.status})`;
  throw new Refused(answer.status, detail, data.remedy);
}

/** Moves Airflow's own page, of which this one is a frame, to one of its places. */
export function toHost(place) {
  const target = new URL(place, AIRFLOW).href;
  if (window.parent === window) {
    window.location.assign(target);
    return;
  }
  const link = window.parent.document.createElement("a"); // the sandbox lets a frame move its host in no other way
  link.href = target;
  window.parent.document.body.append(link);
  link.click();
  link.remove();
}

export function hostLink(text, place) {
  const click = (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    toHost(place);
  };
  return h("a", { href: new URL(place, AIRFLOW).href, onclick: click }, text);
}

function expired() {
  if (document.getElementById("expired")) return;
  const next = encodeURIComponent(window.parent.location.href);
  document.getElementById("notes").append(
    h("p", { class: "note bad", id: "expired" }, S.expired, button(S.login, () => toHost(`api/v2/auth/login?next=${next}`))),
  );
}
