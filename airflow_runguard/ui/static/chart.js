// What came of the work, over time: done in one picture, what did not go through in another of its own scale.
import { get } from "./api.js";
import { button, h, section } from "./dom.js";
import { S } from "./strings.js";
import { absolute } from "./times.js";

const T = S.overview;
const TROUBLE = ["in_doubt", "failed", "paused"];
const WIDTH = 720;
const HEIGHT = 90;

export async function bars(place) {
  const draw = async (window) => {
    const data = await get("pulse", { window });
    const choices = Object.entries(T.windows).map(([name, text]) => button(text, () => draw(name), { class: "choice", "aria-pressed": String(name === window) }));
    place.replaceChildren(section(
      T.chart,
      h("div", { class: "line" }, ...choices, h("span", { class: "muted" }, data.span === "hour" ? T.hours : T.days)),
      data.slots.some((slot) => ["done", ...TROUBLE].some((state) => slot[state]))
        ? h("div", { class: "columns" }, one(data, ["done"], T.chartDone), one(data, TROUBLE, T.chartTrouble))
        : h("p", { class: "muted" }, T.chartEmpty),
      table(data),
    ));
  };
  await draw("24h");
}

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
      return h("rect", { class: state, x: number * step + 1, y: from, width: Math.max(1, step - 2), height }, h("title", {}, told));
    });
  });
  const total = sums.reduce((sum, n) => sum + n, 0);
  return h(
    "figure",
    {},
    h("figcaption", {}, h("strong", {}, total.toLocaleString()), ` ${name}`, h("span", { class: "end muted" }, `↑ ${top.toLocaleString()}`)),
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
      h("tbody", {}, ...rows.map((slot) => h("tr", {}, h("th", { scope: "row" }, absolute(slot.at)), ...states.map((state) => h("td", {}, (slot[state] ?? 0).toLocaleString())))))),
  );
}
