// The list: filter, order, pages by key, live lines, selection, export. A tab of Airflow's is the same list, scoped.
import { resolveMany } from "./actions.js";
import { exported, get, hostLink } from "./api.js";
import { button, empty, h } from "./dom.js";
import { everySoOften, keepingFocus } from "./live.js";
import { badge, className, count, inLedger, money, parameters, place, task } from "./parts.js";
import { S } from "./strings.js";
import { setNow, time } from "./times.js";

const T = S.records;
const FIRST = ["state", "failure_class", "dag_id", "key_prefix", "needs_person", "sort"];
const FURTHER = ["task_id", "run_id", "map_index", "namespace", "partition", "gate", "waiting", "prevented", "holder", "currency", "since", "until"];
const STATES = ["in_doubt", "failed", "paused", "pending", "running", "done"];
const CLASSES = ["none", "timeout", "quota", "validation", "processing", "planning", "unknown"];
const ENOUGH = 50;

/** What the address asks for. Airflow leaves `{MAP_INDEX}` as it is where a task is not mapped. */
function wanted() {
  const found = {};
  for (const name of [...FIRST, ...FURTHER]) {
    const values = parameters().getAll(name).filter((value) => value !== "");
    if (values.length) found[name] = name === "state" ? values : values[0];
  }
  if (found.map_index?.startsWith("{")) found.map_index = "-1";
  for (const name of ["dag_id", "run_id", "task_id"]) if (found[name]?.startsWith("{")) delete found[name];
  return found;
}

export async function show(main, me) {
  const tab = parameters().get("tab");
  const filter = wanted();
  const list = new List(filter, tab, me);
  const head = tab
    ? h("div", { class: "line" }, h("h1", {}, T.tab[tab] ?? T.title), h("span", { class: "end" }, hostLink(T.inLedger, inLedger("records", filter))))
    : h("h1", { class: "offscreen" }, T.title);
  main.replaceChildren(head, tab ? "" : form(filter), list.bar, list.place, list.foot);
  await list.more();
  if (tab === "task_instance" && list.rows.size === 1 && !list.next) {
    const [id] = list.rows.keys();
    window.history.replaceState(null, "", place("record", { id })); // here, so that nothing blinks
    const record = await import("./record.js");
    await record.show(main);
    return;
  }
  everySoOften(() => list.again());
}

// -- the filter --------------------------------------------------------------------------------------------------------

function form(filter) {
  const submit = (event) => {
    event.preventDefault();
    const more = {};
    for (const [name, value] of new FormData(event.target)) more[name] = ["since", "until"].includes(name) && value ? new Date(value).toISOString() : name === "state" ? value.split(",") : value.trim();
    window.location.assign(place("records", more));
  };
  const further = FURTHER.some((name) => filter[name]);
  const onchange = (event) => event.target.matches("select, input[type=checkbox]") && event.currentTarget.requestSubmit();
  return h(
    "form",
    { class: "filter", onsubmit: submit, onchange, role: "search" },
    ...FIRST.map((name) => field(name, filter[name])),
    h("details", { open: further || null }, h("summary", {}, T.moreFields), h("div", { class: "fields" }, ...FURTHER.map((name) => field(name, filter[name])))),
    h("div", { class: "line" }, h("button", {}, T.filter), Object.keys(filter).length ? h("a", { href: place("records") }, T.clear) : null),
  );
}

function field(name, value) {
  const text = T.fields[name];
  const choice = (values, words) =>
    h("label", {}, h("span", {}, text), h("select", { name }, h("option", { value: "" }, name === "sort" ? T.usual : T.any), ...values.map((one) => h("option", { value: one, selected: String(value) === one }, words[one]))));
  if (name === "state") {
    const several = value?.length > 1 ? String(value) : null; // as a number of the chart asks for them
    return choice(several ? [several, ...STATES] : STATES, several ? { ...S.state, [several]: value.map((one) => S.state[one]).join(", ") } : S.state);
  }
  if (name === "prevented") return choice(["replay", "doubt"], T.prevented);
  if (name === "failure_class") return choice(CLASSES, S.failureClass);
  if (name === "sort") return choice(["newest", "oldest", "name"], T.sorts);
  if (name === "needs_person" || name === "waiting") return h("label", { class: "check" }, h("input", { type: "checkbox", name, value: "true", checked: value === "true" }), text);
  if (name === "since" || name === "until") return h("label", {}, h("span", {}, text), h("input", { type: "datetime-local", name, value: value ? local(value) : "" }));
  return h("label", {}, h("span", {}, text), h("input", { type: name === "map_index" ? "number" : "text", name, value: value ?? "", autocomplete: "off", spellcheck: "false" }));
}

function local(text) {
  const at = new Date(text);
  return Number.isNaN(at.valueOf()) ? "" : new Date(at - at.getTimezoneOffset() * 60_000).toISOString().slice(0, 16);
}

// -- the list ----------------------------------------------------------------------------------------------------------

class List {
  constructor(filter, tab, me) {
    Object.assign(this, { filter, tab, me, next: "", rows: new Map(), chosen: new Set(), newest: 0, stopped: false });
    this.body = h("tbody", {});
    this.bar = h("div", { class: "bar" });
    this.place = h("div", { class: "wide" });
    this.foot = h("div", { class: "foot" });
  }

  /** Another page. Where few lines fit, the ledger looks at some thousands at a time: go on until there are enough. */
  async more() {
    const before = this.rows.size;
    this.stopped = false;
    do {
      const page = await get("records", { ...this.filter, after: this.next });
      setNow(page.now);
      for (const record of page.records) this.put(record);
      this.next = page.next;
      this.draw(Boolean(this.next) && this.rows.size - before < ENOUGH);
    } while (this.next && this.rows.size - before < ENOUGH && !this.stopped);
    this.draw(false);
  }

  put(record) {
    this.newest = Math.max(this.newest, record.id);
    const old = this.rows.get(record.id);
    const row = this.row(record);
    if (old) old.row.replaceWith(row);
    else this.body.append(row);
    this.rows.set(record.id, { record, row });
  }

  /** The lines that are shown, as they are now; new ones are only announced, so that nothing jumps. */
  async again() {
    const seen = [...this.rows.keys()].slice(0, 200);
    if (seen.length) {
      const { records } = await get("records/lines", { ids: seen });
      for (const record of records) {
        const shown = this.rows.get(record.id);
        if (shown && JSON.stringify(shown.record) !== JSON.stringify(record)) {
          keepingFocus(this.body, () => this.put(record));
        }
      }
    }
    if ((this.filter.sort ?? (this.filter.key_prefix ? "name" : "newest")) !== "newest") return;
    const { records } = await get("records", { ...this.filter, limit: 50 });
    const fresh = records.filter((record) => record.id > this.newest);
    if (fresh.length) this.fresh.replaceChildren(button(T.fresh(count(fresh.length)), () => window.location.reload(), { class: "fresh" }));
  }

  draw(searching) {
    this.tools();
    if (!this.rows.size && !searching) {
      const filtered = Object.keys(this.filter).length;
      this.place.replaceChildren(
        this.tab
          ? empty(T.emptyTab[this.tab], T.emptyTabTodo)
          : empty(filtered ? T.empty : T.emptyAll, filtered ? T.emptyTodo : S.overview.empty, filtered ? h("a", { href: place("records") }, T.clear) : null),
      );
    } else if (!this.body.isConnected && this.rows.size) {
      this.place.replaceChildren(this.table());
    }
    this.foot.replaceChildren(
      searching
        ? h("p", { class: "muted" }, T.searching(this.rows.size), " ", button(T.stop, () => { this.stopped = true; }))
        : this.next
          ? h("p", {}, this.stopped ? h("span", { class: "muted" }, T.stopped, " ") : null, button(T.next, () => this.more(), { id: "more" }))
          : h("p", { class: "muted" }, this.rows.size ? T.end : ""),
    );
  }

  tools() {
    this.fresh ??= h("span", {});
    const doubtful = [...this.rows.values()].filter(({ record }) => record.state === "in_doubt" && record.may_change);
    const chosen = [...this.chosen].map((id) => this.rows.get(id)?.record).filter(Boolean);
    const all = h("input", { type: "checkbox", "aria-label": T.selectAll, title: T.selectAll, checked: chosen.length > 0 && chosen.length === doubtful.length, onchange: (event) => this.choose(event.target.checked ? doubtful.map(({ record }) => record.id) : []) });
    this.bar.hidden = !this.rows.size && !this.next;
    this.place.classList.toggle("picking", doubtful.length > 0);
    this.place.classList.toggle("priced", [...this.rows.values()].some(({ record }) => record.amount !== null));
    this.bar.replaceChildren(
      h("span", {}, h("strong", {}, T.count(count(this.rows.size), this.next)), " ", this.fresh),
      doubtful.length > 1 ? h("label", { class: "check" }, all, chosen.length ? T.selected(chosen.length) : T.selectAll) : "",
      chosen.length ? button(T.resolve, () => resolveMany(chosen, () => { this.choose([]); return this.again(); })) : "",
      h("span", { class: "end muted" }, `${T.export} `, h("a", { href: exported({ ...this.filter, format: "csv" }), download: "" }, T.exportCsv), " ", h("a", { href: exported({ ...this.filter, format: "json" }), download: "" }, T.exportJson)),
    );
  }

  choose(ids) {
    this.chosen = new Set(ids);
    for (const [id, { row }] of this.rows) {
      const box = row.querySelector("input[type=checkbox]");
      if (box) box.checked = this.chosen.has(id);
    }
    this.tools();
  }

  table() {
    const heads = [["", "pick"], [T.state, ""], [T.key, ""], [T.failure, "narrow"], [T.why, "narrow"], [T.task, ""], [T.amount, "right"], [T.updated, ""]];
    return h("table", { class: "list" }, h("thead", {}, h("tr", {}, ...heads.map(([text, kind]) => h("th", { scope: "col", class: kind }, text)))), this.body);
  }

  row(record) {
    const pick = (event) => {
      if (event.target.checked) this.chosen.add(record.id);
      else this.chosen.delete(record.id);
      this.tools();
    };
    const may = record.may_change && record.state === "in_doubt";
    const waits = [T.until, record.resume_at]; // also what runs and keeps its place
    const [words, until] = { paused: waits, running: record.resume_at ? waits : [T.lease, record.lease_until] }[record.state] ?? [];
    return h(
      "tr",
      {},
      h("td", { class: "pick" }, may ? h("input", { type: "checkbox", "aria-label": T.select(record.key), checked: this.chosen.has(record.id), onchange: pick }) : ""),
      h("td", {}, badge(record.state), until ? h("div", { class: "muted small" }, time(until, { words })) : ""),
      h("td", { class: "name" }, h("a", { href: place("record", { id: record.id }), class: "key", title: record.key }, record.key), h("div", { class: "muted small" }, record.namespace), h("div", { class: "small when-narrow", title: record.error }, record.error)),
      h("td", { class: "narrow" }, className(record.failure_class)),
      h("td", { class: "narrow said", title: record.error }, record.error || S.none),
      h("td", { class: "name" }, task(record), h("div", { class: "muted small" }, record.run_id ?? "")),
      h("td", { class: "right" }, money(record.amount, record.currency)),
      h("td", {}, time(record.updated_at)),
    );
  }
}
