// One record: where it stands and who moves it next, in the API's sentences; its calls, its history, its task in Airflow.
import { actions } from "./actions.js";
import { airflow, get, hostLink } from "./api.js";
import { Calls } from "./calls.js";
import { button, empty, h, note, section } from "./dom.js";
import { drawer, everySoOften } from "./live.js";
import { badge, copyable, inLedger, instance, json, money, parameters, place, task } from "./parts.js";
import { S } from "./strings.js";
import { localised, setNow, time } from "./times.js";

const T = S.record;
const TIMES = new Set(["claimed_at", "lease_until", "resume_at", "no_later_than", "first_unknown_at", "first_intent_at", "finished_at", "created_at", "updated_at"]);
const FACTS = [
  "effect", "failure_class", "amount", "resume_at", "lease_until", "no_later_than", "first_unknown_at", "finished_at", "gate", "partition",
  "holder", "claimed_at", "created_at", "updated_at", "replays", "result_missing",
];
const FURTHER = ["generation", "fence", "first_intent_at", "completeness", "claims", "pauses", "call_style", "on_doubt", "store_result", "payload_fields"];
const BUSY = ["running", "deferred", "queued", "scheduled", "restarting", "up_for_retry", "up_for_reschedule", "awaiting_input", null];

export async function show(main) {
  const id = parameters().get("id");
  const top = h("div", {});
  const below = h("div", {});
  const calls = new Calls(id, () => look());
  main.replaceChildren(top, calls.place, below);
  let shown;
  const drawTop = drawer(top, (data) => head(data, look));
  const drawBelow = drawer(below, (data) => tail(data, id));
  async function look() {
    const data = await get(`records/${id}`);
    setNow(data.now);
    data.instance = await inAirflow(data.record);
    const moved = shown && (shown.record.fence !== data.record.fence || shown.record.generation !== data.record.generation);
    if (moved) note(T.moved);
    const changed = !shown || shown.record.updated_at !== data.record.updated_at || shown.events[0]?.id !== data.events[0]?.id;
    shown = data;
    drawTop(data);
    drawBelow(data);
    if (changed) await calls.look(data);
  }
  try {
    await look();
  } catch (error) {
    if (error.status !== 404) throw error;
    main.replaceChildren(empty(T.gone, "", h("a", { href: place("records") }, T.back)));
    return;
  }
  everySoOften(look);
}

/** What Airflow says of the record's task instance: asked by the reader, with the reader's own rights. */
async function inAirflow(record) {
  if (!record.dag_id || !record.run_id || !record.task_id) return null;
  const parts = [record.dag_id, record.run_id, record.task_id].map(encodeURIComponent);
  try {
    const found = await airflow("GET", `dags/${parts[0]}/dagRuns/${parts[1]}/taskInstances/${parts[2]}/${record.map_index ?? -1}`);
    return { state: found.state, try_number: found.try_number };
  } catch (error) {
    return error.status === 404 ? { gone: true } : null;
  }
}

export function disagreement(record, found) {
  if (!found) return "";
  if (found.gone) return S.disagree.gone;
  const says = found.state ?? S.none;
  if (record.state === "done" && ["failed", "upstream_failed"].includes(found.state)) return S.disagree[record.observed ? "done_failed_observed" : "done_failed"](says);
  if (["in_doubt", "failed", "pending", "paused", "broken"].includes(record.state) && found.state === "success") return S.disagree.undone_success(S.state[record.state]);
  if (record.state === "running" && !BUSY.includes(found.state)) return S.disagree.running_not(says);
  if (record.state === "paused" && ["failed", "skipped", "removed"].includes(found.state)) return S.disagree.paused_ended(says);
  return "";
}

function head(data, look) {
  const record = data.record;
  const differs = disagreement(record, data.instance);
  const banner = (title, text, ...more) => h("div", { class: "banner warn" }, h("strong", {}, title), h("p", {}, text), ...more);
  const commands = Object.entries(record.commands);
  return [
    parameters().get("tab")
      ? h("p", { class: "crumbs" }, record.namespace, " · ", hostLink(S.records.inLedger, inLedger("record", { id: record.id })))
      : h("p", { class: "crumbs" }, h("a", { href: place("records") }, T.back), " / ", h("a", { href: place("records", { namespace: record.namespace }) }, record.namespace)),
    h("div", { class: "line title" }, h("h1", {}, record.key), badge(record.state), ...actions(data, look)),
    h("div", { class: `standing ${record.state}` },
      h("p", { class: "why" }, localised(record.why)),
      h("p", {}, h("strong", {}, `${T.who}: `), localised(`${record.who}.`)),
      commands.length
        ? h("details", { id: "typed" }, h("summary", {}, T.typed), h("dl", {}, ...commands.flatMap(([what, typed]) => [h("dt", {}, what), h("dd", {}, copyable(typed))])))
        : ""),
    differs ? banner(T.disagree, differs) : "",
    ...data.questions.map((asked) => banner(T.parked, `${task(asked)} · ${asked.run_id}`, hostLink(T.parkedLink, `${instance(asked)}/required_actions`))),
    data.gate?.closed
      ? banner([T.gateClosed, " ", h("a", { href: place("gates") }, data.gate.name), ", ", data.gate.closed_for_good ? T.gateOpened : [T.gateUntil, " ", time(data.gate.closed_until, { both: true })]], data.gate.why)
      : "",
    h("div", { class: "columns" }, facts(record, data.instance, data.replays), said(record)),
  ];
}

function facts(record, found, replays) {
  const values = {
    ...record,
    amount: record.amount === null ? null : money(record.amount, record.currency),
    failure_class: record.failure_class && S.failureClass[record.failure_class],
    effect: record.effect && T.effect[record.effect],
    holder: record.dag_id ? T.heldBy(task(record), record.run_id, record.try_number, [record.host, record.pid].filter(Boolean).join(":")) : null,
    payload_fields: record.payload_fields.join(", "),
    replays: replays && h("span", {}, T.replays(replays.times), " ", time(replays.at, { both: true })),
    claims: record.claims || null,
    pauses: record.pauses || null,
    completeness: record.state === "done" ? record.completeness : null,
    lease_until: record.state === "running" ? record.lease_until : null,
    no_later_than: record.open_calls || record.state === "in_doubt" ? record.no_later_than : null,
    gate: record.gate && h("a", { href: place("gates") }, record.gate),
  };
  const rows = (names) => names
    .filter((name) => values[name] !== null && values[name] !== undefined && values[name] !== "")
    .flatMap((name) => [h("dt", {}, T.facts[name]), h("dd", {}, TIMES.has(name) ? time(values[name], { both: true }) : T.values[name]?.[values[name]] ?? values[name])]);
  const links = record.dag_id && record.run_id
    ? [h("dt", {}, T.live), h("dd", { class: "links" },
        hostLink(T.task, instance(record)), hostLink(T.log, `${instance(record)}?try_number=${record.try_number ?? 1}`), hostLink(T.run, instance(record).replace(/\/tasks\/.*/, "")),
        found && !found.gone ? h("span", { class: "muted" }, T.says(found.state ?? S.none)) : "")]
    : [h("dt", {}, T.live), h("dd", { class: "muted" }, T.noRun)];
  return h("div", {},
    h("dl", { class: "facts" }, ...links, ...rows(FACTS)),
    h("details", { id: "further" }, h("summary", {}, T.further), h("dl", { class: "facts" }, ...rows(FURTHER))));
}

function said(record) {
  const parts = [
    record.error ? [h("h3", {}, T.error), h("pre", {}, record.error)] : [],
    record.evidence ? [h("h3", {}, T.evidence), h("pre", {}, record.evidence)] : [],
    record.payload ? [h("h3", {}, T.payload), json(record.payload)] : [],
    record.result ? [h("h3", {}, T.result), record.result.stored ? json(record.result.value) : h("p", {}, record.result.why || S.none)] : [],
    record.shows_results ? [] : [h("p", { class: "muted small" }, T.hidden)],
  ];
  return h("div", {}, ...parts.flat());
}

function tail(data, id) {
  const list = h("ol", { class: "timeline" }, ...data.events.map(event));
  let before = data.events.at(-1)?.id;
  const earlier = async () => {
    const page = await get(`records/${id}/events`, { before });
    list.append(...page.events.map(event));
    before = page.next;
    if (!before) more.remove();
  };
  const more = data.events.length === 100 ? button(T.earlier, earlier, { id: "earlier" }) : "";
  return [
    section(T.timeline, list, more),
    data.generations.length
      ? section(T.generations, h("ul", { class: "cards" }, ...data.generations.map((one) => h("li", {},
          h("div", { class: "line" }, h("strong", {}, T.generation(one.generation)), h("span", { class: "end" }, time(one.at, { both: true }))),
          h("div", { class: "muted" }, `${one.actor}: ${one.reason} (${T.generationTold(S.state[one.before] ?? one.before, one.although_applied)})`)))))
      : "",
  ];
}

function event(one) {
  return h("li", { class: one.kind },
    h("span", { class: "at" }, time(one.at, { both: true })),
    h("span", { class: "sentence" }, localised(one.sentence)));
}
