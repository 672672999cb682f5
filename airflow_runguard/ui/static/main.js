// The page: its head, and the view that the address names.
import { get } from "./api.js";
import { empty, h } from "./dom.js";
import { parameters, place } from "./parts.js";
import { S } from "./strings.js";

const VIEWS = { overview: "./overview.js", records: "./records.js", record: "./record.js", gates: "./gates.js", health: "./health.js" };

function head(view, me) {
  const top = document.getElementById("top");
  if (parameters().get("tab")) {
    top.hidden = true; // a tab of Airflow's has a head already
    return;
  }
  const current = view === "record" ? "records" : view;
  const links = Object.entries(S.nav)
    .filter(([name]) => name !== "health" || me.may_see_settings)
    .map(([name, text]) => h("a", { href: place(name), "aria-current": name === current ? "page" : null }, text));
  top.replaceChildren(h("nav", { "aria-label": S.title }, ...links), h("span", { class: "muted" }, `${S.deployment} `, h("strong", {}, me.deployment)));
}

async function start() {
  const main = document.getElementById("main");
  const view = parameters().get("view") ?? "overview";
  main.replaceChildren(h("p", { class: "muted" }, S.loading));
  try {
    const me = await get("me");
    head(view, me);
    if (!VIEWS[view]) {
      main.replaceChildren(empty(S.notHere));
      return;
    }
    const { show } = await import(VIEWS[view]);
    await show(main, me);
    document.title = `${main.querySelector("h1")?.textContent ?? S.nav[view]} · ${S.title}`;
  } catch (error) {
    main.replaceChildren(empty(error.message || S.failed, error.remedy));
    if (!error.status) console.error(error);
  }
  document.body.dataset.ready = "1";
}

start();
