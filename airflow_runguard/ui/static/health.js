// What a report of a fault needs, to look at and to copy as one text.
import { get } from "./api.js";
import { button, empty, h, note, section } from "./dom.js";
import { S } from "./strings.js";

const T = S.health;
const GRAVE = ["fail", "warn", "ok", "skipped"];
const SIGN = { ok: "done", warn: "paused", fail: "failed", skipped: "pending" };

export async function show(main, me) {
  if (!me.may_see_settings) {
    main.replaceChildren(empty(T.denied, ""));
    return;
  }
  const data = await get("health");
  const copy = async () => {
    await navigator.clipboard.writeText(JSON.stringify(data, null, 2));
    note(S.copied);
  };
  const list = (values) => h("dl", { class: "facts" }, ...Object.entries(values).flatMap(([name, value]) => [h("dt", {}, name.replaceAll("_", " ")), h("dd", {}, value === "" || value === null ? S.none : String(value))]));
  main.replaceChildren(
    h("div", { class: "line" }, h("h1", {}, T.title), h("span", { class: "muted" }, T.told), h("span", { class: "end" }, button(T.copy, copy))),
    h("p", {}, h("strong", {}, data.said.replaceAll("_", " "))),
    section(T.checks, h("div", { class: "wide" }, h("table", {}, h("tbody", {}, ...worstFirst(data.checks).map((one) => h("tr", {},
      h("td", {}, h("span", { class: `badge ${SIGN[one.status]}` }, one.status)),
      h("th", { scope: "row" }, one.name.replaceAll("_", " ")),
      h("td", {}, one.found, h("div", { class: "muted small" }, one.meaning), one.remedy ? h("div", { class: "small" }, one.remedy) : "")))))),
    ),
    h("div", { class: "columns" },
      section(T.ledger, data.ledger ? list(data.ledger) : h("p", { class: "muted" }, S.none), h("h2", {}, T.versions), list(data.versions)),
      section(T.settings, h("p", { class: "muted" }, T.settingsTold), list(data.settings))),
  );
}

const worstFirst = (checks) => [...checks].sort((a, b) => GRAVE.indexOf(a.status) - GRAVE.indexOf(b.status));
