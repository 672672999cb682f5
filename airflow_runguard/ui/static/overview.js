// Where all records stand, and what needs somebody. Every number leads to its list.
import { get } from "./api.js";
import { bars } from "./chart.js";
import { empty, h, section } from "./dom.js";
import { drawer, everySoOften } from "./live.js";
import { badge, className, count, money, place, stake, task } from "./parts.js";
import { S } from "./strings.js";
import { setNow, time } from "./times.js";

const STATES = ["in_doubt", "failed", "paused", "pending", "running", "done"];
const CLASSES = ["timeout", "quota", "validation", "processing", "planning", "unknown"];
const T = S.overview;

export async function show(main) {
  const rest = h("div", {});
  const chart = h("div", {});
  main.replaceChildren(h("h1", { class: "offscreen" }, S.nav.overview), rest, chart);
  const draw = drawer(rest, picture);
  const look = async () => {
    const data = await get("overview");
    setNow(data.now);
    draw(data);
    chart.hidden = !data.counts.length;
  };
  await look();
  await bars(chart);
  everySoOften(look);
}

function picture(data) {
  const cells = counted(data);
  const lost = data.lost_time && h("div", { class: "banner bad" }, h("strong", {}, T.lost), h("p", {}, data.lost_time), h("code", {}, T.lostTodo));
  if (!data.counts.length && !data.running.n) return [lost, empty(T.emptyTitle, T.empty)];
  return [
    lost,
    tiles(data, cells),
    h("div", { class: "columns overview" }, h("div", {}, needing(data), closed(data)), h("div", {}, matrix(data, cells), running(data))),
  ];
}

function counted(data) {
  const cells = new Map();
  const add = (state, name, n) => {
    for (const key of [`${state}/${name}`, `${state}/*`, `*/${name}`]) cells.set(key, (cells.get(key) ?? 0) + n);
  };
  for (const one of data.counts) add(one.state, one.failure_class || "none", one.n);
  if (data.running.n) add("running", "none", data.running.n);
  return cells;
}

function tiles(data, cells) {
  const needs = data.counts.filter((one) => one.needs_person || one.state === "in_doubt").reduce((sum, one) => sum + one.n, 0);
  const tile = (name, number, link, { below = "", told = null, kind = "" } = {}) =>
    h("div", { class: `tile ${kind}`, title: told }, h("a", { class: "figure", href: link }, h("span", { class: "number" }, number), h("span", {}, name)), below && h("span", { class: "muted" }, below));
  const doubt = cells.get("in_doubt/*") ?? 0;
  const amounts = (state) => stake(data.counts.filter((one) => one.state === state)).flatMap(([currency, sum], number) => [number ? ", " : "", h("a", { href: place("records", { state, currency }) }, money(sum, currency))]);
  const prevented = (kind) => tile(T.prevented[kind], count(data.prevented[kind].n, data.prevented[kind].more), place("records", { prevented: kind }), { below: T.lately, told: T.preventedTold[kind] });
  return h(
    "div",
    { class: "tiles" },
    tile(T.needs, count(needs), place("records", { needs_person: "true", sort: "oldest" }), { kind: needs ? "warn" : "" }),
    tile(T.doubt, count(doubt), place("records", { state: "in_doubt", sort: "oldest" }), { below: amounts("in_doubt"), kind: doubt ? "warn" : "" }),
    tile(T.paused, count(cells.get("paused/*") ?? 0), place("records", { state: "paused" }), { below: amounts("paused") }),
    tile(T.running, count(data.running.n, data.running.more), place("records", { state: "running", sort: "oldest" })),
    tile(T.gates, count(data.gates.length), place("gates", { closed: "true" })),
    prevented("replay"),
    prevented("doubt"),
  );
}

function matrix(data, cells) {
  const shown = CLASSES.filter((name) => cells.get(`*/${name}`));
  const cell = (state, name) => {
    const number = cells.get(`${state}/${name}`) ?? 0;
    if (!number) return h("td", { class: "muted" }, "·");
    const more = state === "running" && data.running.more;
    return h("td", {}, h("a", { href: place("records", { state, failure_class: name === "*" ? "" : name }) }, count(number, more)));
  };
  const states = STATES.filter((state) => cells.get(`${state}/*`));
  for (const key of cells.keys()) {
    const [state] = key.split("/");
    if (state !== "*" && !STATES.includes(state) && !states.includes(state)) states.push(state);
  }
  return section(
    T.matrix,
    h("div", { class: "wide" }, h(
      "table",
      { class: "numbers" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, S.records.state), h("th", { scope: "col" }, T.total), ...shown.map((name) => h("th", { scope: "col" }, S.failureClass[name])))),
      h("tbody", {}, ...states.map((state) => h("tr", {}, h("th", { scope: "row" }, badge(state)), cell(state, "*"), ...shown.map((name) => cell(state, name))))),
    )),
  );
}

function needing(data) {
  const since = (one) => one.first_unknown_at ?? one.updated_at;
  const rows = [...data.needs_person].sort((a, b) => since(a).localeCompare(since(b)));
  return section(
    T.needs,
    rows.length
      ? h("ol", { class: "cards" }, ...rows.map((one) => h(
          "li",
          {},
          h("div", { class: "line" }, badge(one.state), h("a", { href: place("record", { id: one.id }), class: "key" }, one.key), h("span", { class: "muted end" }, time(since(one)))),
          h("div", { class: "line muted" }, h("span", { class: "cut" }, one.error || className(one.failure_class)), h("span", { class: "end" }, [one.amount && money(one.amount, one.currency), task(one)].filter(Boolean).join(" · "))),
        )))
      : h("p", { class: "muted" }, T.needsNone),
    rows.length ? h("p", {}, h("a", { href: place("records", { needs_person: "true", sort: "oldest" }) }, T.needsMore)) : null,
  );
}

function closed(data) {
  const gates = data.gates.map((gate) => h(
    "li",
    {},
    h("div", { class: "line" }, h("span", { class: "badge paused" }, S.gates.closed), h("a", { href: place("gates"), class: "key" }, gate.name), h("span", { class: "end muted" }, gate.waiting ? h("a", { href: place("records", { gate: gate.name, waiting: "true" }) }, count(gate.waiting), " ", S.gates.waiting.toLowerCase()) : T.nobodyWaits)),
    h("div", { class: "line muted" }, h("span", { class: "cut" }, gate.why), h("span", { class: "end" }, gate.closed_for_good ? S.gates.untilOpened : time(gate.closed_until, { both: true }))),
  ));
  const freezes = data.freezes.map((one) => h(
    "li",
    {},
    h("div", { class: "line" }, h("strong", {}, `${S.act.freeze.scopes[one.scope]} ${one.value}`), h("span", { class: "end muted" }, time(one.at))),
    h("div", { class: "muted" }, `${one.actor}: ${one.reason}`),
  ));
  return section(
    T.closedGates,
    gates.length ? h("ul", { class: "cards" }, ...gates) : h("p", { class: "muted" }, T.gatesNone),
    freezes.length ? h("h3", {}, T.freezes) : null,
    freezes.length ? h("ul", { class: "cards" }, ...freezes) : null,
  );
}

function running(data) {
  return section(
    T.runningNow,
    data.running_now.length
      ? h("ul", { class: "cards" }, ...data.running_now.map((one) => h(
          "li",
          {},
          h("div", { class: "line" }, badge("running"), h("a", { href: place("record", { id: one.id }), class: "key" }, one.key), h("span", { class: "end muted" }, T.claimed, " ", time(one.claimed_at))),
          h("div", { class: "line muted" }, h("span", { class: "cut" }, `${task(one)} · ${one.host}`), h("span", { class: "end" }, one.resume_at ? time(one.resume_at, { words: S.records.until }) : time(one.lease_until, { words: S.records.lease }))),
        )))
      : h("p", { class: "muted" }, T.runningNone),
  );
}
