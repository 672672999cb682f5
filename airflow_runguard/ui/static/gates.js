// Gates and freezes: what keeps calls from starting, who waits, and what was done to them.
import { get, post } from "./api.js";
import { ask, labelled } from "./dialog.js";
import { button, empty, h, section } from "./dom.js";
import { drawer, everySoOften } from "./live.js";
import { count, parameters, place } from "./parts.js";
import { S } from "./strings.js";
import { absolute, now, setNow, span, time } from "./times.js";

const T = S.gates;
const A = S.act;

export async function show(main) {
  const body = h("div", {});
  main.replaceChildren(h("h1", { class: "offscreen" }, T.title), body);
  const draw = drawer(body, (data) => picture(data, look));
  async function look() {
    const data = await get("gates");
    setNow(data.now);
    draw(data);
  }
  await look();
  everySoOften(look);
}

function picture(data, look) {
  const may = data.may_change;
  const closed = Boolean(parameters().get("closed"));
  const shown = { ...data, gates: data.gates.filter((gate) => gate.closed || !closed) };
  return [
    section(T.title, h("p", { class: "muted" }, T.told, closed ? [" ", h("a", { href: place("gates") }, T.allGates)] : ""), shown.gates.length ? gates(shown, look) : closed ? h("p", {}, T.emptyClosed) : empty(T.empty, T.emptyTodo), may ? h("p", {}, button(A.close.button, () => close(null, look), { id: "close-new" })) : ""),
    section(T.freezes, h("p", { class: "muted" }, T.freezesTold), data.freezes.length ? freezes(data, look) : h("p", { class: "muted" }, T.freezesEmpty), may ? h("p", {}, button(A.freeze.button, () => freeze(look), { id: "freeze-new" })) : ""),
    section(T.history, data.history.length ? h("ol", { class: "timeline" }, ...data.history.map(happened)) : h("p", { class: "muted" }, T.historyEmpty)),
  ];
}

const heads = (...texts) => h("thead", {}, h("tr", {}, ...texts.map((text) => h("th", { scope: "col" }, text))));

function gates(data, look) {
  return h("div", { class: "wide" }, h("table", { class: "gates" },
    heads(T.name, T.state, T.until, T.why, T.waiting, T.pace, ""),
    h("tbody", {}, ...data.gates.map((gate) => h("tr", {},
      h("th", { scope: "row", class: "name" }, gate.name),
      h("td", {}, h("span", { class: `badge ${gate.closed ? "paused" : "done"}` }, gate.closed ? T.closed : T.open)),
      h("td", {}, !gate.closed ? S.none : gate.closed_for_good ? T.untilOpened : time(gate.closed_until, { both: true })),
      h("td", { class: "said", title: gate.why }, gate.why || S.none, h("div", { class: "muted small" }, gate.actor ? `${gate.actor} · ` : "", time(gate.updated_at))),
      h("td", {}, gate.waiting ? h("a", { href: place("records", { gate: gate.name, waiting: "true" }) }, count(gate.waiting)) : "0"),
      h("td", { class: "pace" }, T.pace_(gate.rate ?? data.default_rate, gate.rate !== null)),
      h("td", { class: "buttons" }, data.may_change
        ? [gate.closed ? named(A.open.one, gate.name, () => open(gate, look)) : named(A.close.one, gate.name, () => close(gate, look)), named(A.rate.one, gate.name, () => pace(gate, data.default_rate, look))]
        : "")))),
  ));
}

function freezes(data, look) {
  return h("div", { class: "wide" }, h("table", { class: "gates" },
    heads(T.scope, T.since, T.by, T.reason, T.ended, ""),
    h("tbody", {}, ...data.freezes.map((one) => h("tr", { class: one.thawed_at ? "muted" : "" },
      h("th", { scope: "row", class: "name" }, scoped(one)),
      h("td", {}, time(one.at, { both: true })),
      h("td", {}, one.actor),
      h("td", { class: "said", title: one.reason }, one.reason),
      h("td", {}, one.thawed_at ? [time(one.thawed_at), h("div", { class: "small" }, `${one.thawed_by}: ${one.thaw_reason}`)] : S.none),
      h("td", { class: "buttons" }, !one.thawed_at && data.may_change ? named(A.thaw.one, scoped(one), () => thaw(one, look)) : "")))),
  ));
}

const scoped = (one) => `${A.freeze.scopes[one.scope]} ${one.value}`.trim();

/** A button of one line among many: to whom only hears it, it says of which. */
const named = (text, name, click) => button(text, click, { "aria-label": `${text} ${name}` });

function happened(one) {
  const about = one.gate ?? (one.scope ? scoped(one) : "");
  const until = one.until && one.until !== "infinity" ? ` ${T.untilThen} ${absolute(one.until)}` : "";
  const rate = one.rate ? ` ${T.to} ${one.rate}/s` : "";
  return h("li", {}, h("span", { class: "at" }, time(one.at, { both: true })), h("span", { class: "sentence" }, `${one.actor} ${T.kinds[one.kind] ?? one.kind} ${about}`, rate, until, one.reason ? `: ${one.reason}` : ""));
}

const local = (at) => new Date(at - new Date(at).getTimezoneOffset() * 60_000).toISOString().slice(0, 16);

function close(gate, done) {
  ask({
    title: A.close.title,
    fields: [
      gate ? h("p", {}, h("strong", {}, gate.name)) : labelled(A.close.name, h("input", { name: "gate", required: true, maxlength: 512, autocomplete: "off" })),
      labelled(A.close.until, h("input", { name: "until", type: "datetime-local", required: true, value: local(now() + 3_600_000) })),
    ],
    will: () => A.close.will,
    go: A.close.go,
    send: (values) => post("gates/close", { gate: gate?.name ?? values.gate.trim(), epoch: gate?.epoch ?? null, until: new Date(values.until).toISOString(), reason: values.reason }),
    done,
  });
}

function open(gate, done) {
  ask({ title: A.open.title(gate.name), will: () => A.open.will, go: A.open.go, send: (values) => post("gates/open", { gate: gate.name, epoch: gate.epoch, reason: values.reason }), done });
}

function pace(gate, usual, done) {
  ask({
    title: A.rate.title(gate.name),
    fields: [labelled(A.rate.rate(usual), h("input", { name: "rate", type: "number", min: "0.001", step: "any", value: gate.rate ?? "" }))],
    will: (values) => {
      const rate = Number(values.rate) || usual;
      return A.rate.will(gate.waiting, rate.toLocaleString(), span(Math.max(0, gate.waiting - 1) / rate));
    },
    go: A.rate.go,
    send: (values) => post("gates/rate", { gate: gate.name, epoch: gate.epoch, rate: values.rate ? Number(values.rate) : null, reason: values.reason }),
    done,
  });
}

function freeze(done) {
  const name = labelled("", h("input", { name: "value", maxlength: 512, autocomplete: "off" }));
  ask({
    title: A.freeze.title,
    fields: [
      labelled(A.freeze.scope, h("select", { name: "scope" }, ...Object.entries(A.freeze.scopes).map(([value, text]) => h("option", { value, selected: value === "dag_id" }, text)))),
      name,
    ],
    will({ scope, value }) {
      name.hidden = scope === "all";
      name.querySelector("input").required = scope !== "all";
      name.querySelector("span").textContent = A.freeze.value[scope] ?? "";
      return A.freeze.will(A.freeze.where[scope](value.trim() || "…"));
    },
    go: A.freeze.go,
    danger: true,
    send: (values) => post("freezes", { scope: values.scope, value: values.scope === "all" ? "" : values.value.trim(), reason: values.reason }),
    done,
  });
}

function thaw(one, done) {
  ask({ title: A.thaw.title, fields: [h("p", {}, h("strong", {}, scoped(one)))], will: () => A.thaw.will, go: A.thaw.go, send: (values) => post("freezes/thaw", { scope: one.scope, value: one.value, reason: values.reason }), done });
}
