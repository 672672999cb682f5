// The calls (items) of a record: pages by name, and only the rows in sight are elements, so that a million is no burden.
import { reopenItems, resolve } from "./actions.js";
import { get } from "./api.js";
import { button, h, section } from "./dom.js";
import { keepingFocus } from "./live.js";
import { badge, copyable, count } from "./parts.js";
import { S } from "./strings.js";
import { span, time } from "./times.js";

const T = S.record;
const ROW = 34; // pixels, as in app.css
const SIGHT = 400;
const FEW = 12;
const MOST = 1_000; // items that one answer of a person may name
const STATES = ["in_doubt", "started", "failed", "paused", "pending", "done"];

export class Calls {
  constructor(id, changed) {
    Object.assign(this, { id, changed, state: "", generation: "", rows: [], next: "", loading: false, chosen: new Map() });
    this.place = h("div", {});
    this.sight = h("div", { class: "sight", tabindex: "0", role: "table", "aria-label": T.calls, onscroll: () => this.scrolled() });
    this.inner = h("div", { class: "inner" });
    this.number = h("span", { class: "muted" });
    this.acts = h("span", { class: "line" });
    this.sight.append(this.inner);
  }

  async look(data) {
    this.data = data;
    this.chosen.clear();
    await this.restart();
  }

  async restart() {
    const before = this.sight.scrollTop;
    const wanted = Math.max(this.rows.length, 100);
    Object.assign(this, { rows: [], next: "" });
    do {
      await this.page();
    } while (this.next && this.rows.length < Math.min(wanted, 2_000));
    this.frame();
    this.sight.scrollTop = before;
    this.draw();
  }

  async page() {
    this.loading = true;
    try {
      const page = await get(`records/${this.id}/calls`, { generation: this.generation, state: this.state, after: this.next, limit: 200 });
      this.rows.push(...page.calls);
      this.progress = page.progress;
      this.next = page.next;
    } finally {
      this.loading = false;
    }
  }

  async scrolled() {
    this.draw();
    const left = this.rows.length * ROW - this.sight.scrollTop - SIGHT;
    if (left < 20 * ROW && this.next && !this.loading) {
      await this.page();
      this.draw();
      if (!this.rows.length) await this.scrolled();
    }
  }

  frame() {
    const choose = (event) => {
      this[event.target.name] = event.target.value;
      this.sight.scrollTop = 0;
      this.rows = [];
      this.chosen.clear();
      return this.restart();
    };
    const choice = h("select", { name: "state", "aria-label": T.call.state, onchange: choose }, h("option", { value: "" }, T.callsAll), ...STATES.map((state) => h("option", { value: state, selected: state === this.state }, S.state[state])));
    const latest = this.data.record.generation;
    const generations = Array.from({ length: Math.min(latest, 50) }, (_, number) => latest - number);
    const which = latest > 1
      ? h("select", { name: "generation", "aria-label": T.facts.generation, onchange: choose }, ...generations.map((one) => h("option", { value: one, selected: String(one) === String(this.generation || latest) }, T.generation(one))))
      : "";
    const progress = Object.keys(this.progress ?? {}).length ? h("p", { class: "progress" }, h("strong", {}, `${T.progress}: `), howFar(this.progress)) : "";
    const several = this.rows.length > 1 || this.state || this.next || latest > 1;
    if (!several && !this.rows.length) {
      this.place.replaceChildren();
      return;
    }
    const heads = [T.call.name, T.call.state, T.call.sent, T.call.vendor, T.call.external, T.call.error];
    this.place.replaceChildren(section(
      T.calls,
      several ? h("div", { class: "line" }, which, choice, this.number, this.acts) : "",
      progress,
      h("div", { class: "wide" }, h("div", { class: `calls${this.mayReopen() ? " choosing" : ""}` }, h("div", { class: "call heads" }, this.mayReopen() ? h("span", {}) : "", ...heads.map((text) => h("span", {}, text))), this.sight)),
      this.rows.length ? "" : h("p", { class: "muted" }, this.next ? T.callsLooking : T.callsEmptyState),
    ));
    this.sight.style.height = `${Math.min(SIGHT, Math.max(1, this.rows.length) * ROW + 2)}px`;
    this.sight.classList.toggle("few", this.rows.length <= FEW);
  }

  /** A person orders items of a batch anew, while no holder is at work on it. */
  mayReopen() {
    const { record, may_change: may } = this.data;
    const current = !this.generation || Number(this.generation) === record.generation;
    return may && current && record.call_style === "batch" && !["running", "broken"].includes(record.state);
  }

  choose(call, on) {
    if (on) this.chosen.set(call.name, call);
    else this.chosen.delete(call.name);
    this.offer();
  }

  offer() {
    const { chosen } = this;
    const all = T.reopenState[this.state];
    this.acts.replaceChildren(
      this.mayReopen() && chosen.size && chosen.size <= MOST ? button(T.reopenChosen(chosen.size), () => reopenItems(this.data, this.changed, [...chosen.values()]), { id: "reopen-chosen" }) : "",
      this.mayReopen() && all && this.rows.length ? button(all, () => reopenItems(this.data, this.changed, [], this.state), { id: "reopen-state" }) : "",
    );
  }

  draw() {
    const from = Math.max(0, Math.floor(this.sight.scrollTop / ROW) - 10);
    const shown = this.rows.slice(from, from + SIGHT / ROW + 30);
    this.number.textContent = T.callsCount(count(this.rows.length), this.next);
    this.inner.style.height = `${this.rows.length * ROW}px`;
    keepingFocus(this.inner, () => this.inner.replaceChildren(...shown.map((call, number) => this.row(call, from + number))));
    this.offer();
  }

  row(call, number) {
    const may = this.data.may_change && this.data.record.state === "in_doubt" && call.state === "in_doubt" && call.name !== "body" && call.generation === this.data.record.generation;
    const finished = this.mayReopen() && ["done", "failed"].includes(call.state);
    const told = [call.error, call.evidence].filter(Boolean).join(" · ");
    const row = h(
      "div",
      { class: "call", role: "row" },
      this.mayReopen()
        ? h("span", {}, finished ? h("input", { type: "checkbox", checked: this.chosen.has(call.name), "aria-label": T.selectCall(call.name), onchange: (event) => this.choose(call, event.target.checked) }) : "")
        : "",
      h("span", { class: "cut", title: call.name }, call.name),
      h("span", {}, badge(call.state), may ? button(T.resolveCall, () => resolve(this.data, this.changed, call.name), { class: "plain", "aria-label": `${T.resolveCall} ${call.name}` }) : "",
        finished ? button(T.reopenCall, () => reopenItems(this.data, this.changed, [call]), { class: "plain", "aria-label": `${T.reopenCall} ${call.name}` }) : ""),
      h("span", {}, time(call.intent_at)),
      h("span", { class: "cut" }, copyable(call.vendor_key)),
      h("span", { class: "cut" }, copyable(call.external_id)),
      h("span", { class: "cut", title: told }, told || (call.intent && Object.keys(call.intent).length ? JSON.stringify(call.intent) : S.none)),
    );
    row.style.top = `${number * ROW}px`;
    return row;
  }
}

/** How far a batch is, as its holder said last. What is zero is left out. */
function howFar(progress) {
  const said = Object.entries(T.howFar).filter(([name]) => progress[name]).map(([, sentence]) => sentence({ ...progress, still: span(progress.eta ?? 0) }));
  return said.join(" · ");
}
