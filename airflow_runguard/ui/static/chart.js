// What became of the records that began in each hour or day: done in one picture, the others in one of its own scale.
import { get } from "./api.js";
import { button, h, section } from "./dom.js";
import { count, place } from "./parts.js";
import { S } from "./strings.js";
import { absolute } from "./times.js";

const T = S.overview;
const TROUBLE = ["in_doubt", "failed", "paused"];
const WIDTH = 720;
const HEIGHT = 90;

export async function bars(where) {
  const draw = async (window) => {
    const data = await get("pulse", { window });
    const choices = Object.entries(T.windows).map(([name, text]) => button(text, () => draw(name), { class: "choice", "aria-pressed": String(name === window) }));
    where.replaceChildren(section(
      T.chart,
      h("div", { class: "line" }, ...choices, h("span", { class: "muted" }, T.chartTold[data.span])),
      data.slots.some((slot) => ["done", ...TROUBLE].some((state) => slot[state]))
        ? h("div", { class: "columns" }, one(data, ["done"], T.chartDone), one(data, TROUBLE, T.chartTrouble))
        : h("p", { class: "muted" }, T.chartEmpty),
      table(data),
    ));
  };
  await draw("24h");
}

const LENGTH = { hour: 3_600_000, day: 86_400_000 };

/** The list of what a number counts: records in these states that began in this slot, or since the first. */
const listed = (data, state, slot) =>
  place("records", { state, since: (slot ?? data.slots[0]).at, until: slot && new Date(Date.parse(slot.at) + LENGTH[data.span]).toISOString() });

function one(data, states, name) {
  const sums = data.slots.map((slot) => states.reduce((sum, state) => sum + (slot[state] ?? 0), 0));
  const top = Math.max(1, ...sums);
  const step = WIDTH / data.slots.length;
  const shapes = data.slots.flatMap((slot, number) => {
    let from = HEIGHT;
    return states.filter((state) => slot[state]).map((state) => {
      const height = Math.max(1, (slot[state] / top) * (HEIGHT - 4));
      from -= height;
      const told = `${absolute(slot.at)}: ${slot[state].toLocaleString()} ${S.state[state]}`;
      const open = () => window.location.assign(listed(data, state, slot)); // by keyboard: the same numbers in the table
      return h("rect", { class: state, x: number * step + 1, y: from, width: Math.max(1, step - 2), height, onclick: open }, h("title", {}, told));
    });
  });
  const total = sums.reduce((sum, n) => sum + n, 0);
  const highest = total ? h("span", { class: "end muted" }, T.highest[data.span], " ", h("a", { href: listed(data, states, data.slots[sums.indexOf(top)]) }, count(top))) : "";
  return h(
    "figure",
    {},
    h("figcaption", {}, h("strong", {}, total ? h("a", { href: listed(data, states) }, count(total)) : "0"), ` ${name}`, highest),
    h("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `${name}: ${total}` }, ...shapes),
    states.length > 1 ? h("div", { class: "legend" }, ...states.map((state) => h("span", { class: `badge ${state}` }, S.state[state]))) : null,
  );
}

function table(data) {
  const states = ["done", ...TROUBLE];
  const rows = data.slots.filter((slot) => states.some((state) => slot[state]));
  if (!rows.length) return null;
  return h(
    "details",
    {},
    h("summary", {}, T.chartTable),
    h("table", { class: "numbers" },
      h("thead", {}, h("tr", {}, h("th", {}), ...states.map((state) => h("th", { scope: "col" }, S.state[state])))),
      h("tbody", {}, ...rows.map((slot) => h("tr", {}, h("th", { scope: "row" }, absolute(slot.at)), ...states.map((state) => h("td", { class: "muted" }, slot[state] ? h("a", { href: listed(data, state, slot) }, count(slot[state])) : "·")))))),
  );
}
