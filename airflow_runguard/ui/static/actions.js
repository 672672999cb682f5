// What a person may do to a record. Each carries what was seen of it and is refused when the record moved meanwhile.
import { airflow, get, post } from "./api.js";
import { ask, labelled, options } from "./dialog.js";
import { button, h, note } from "./dom.js";
import { money, stake } from "./parts.js";
import { S } from "./strings.js";
import { now } from "./times.js";

const T = S.act;
const ANSWERS = { happened: "it happened", did_not_happen: "it did not happen: do it", failed: "leave it failed" }; // human.py

/** The buttons that make sense for the record as it stands. */
export function actions(data, done) {
  const { record, may_change: may } = data;
  if (!may) return [];
  const act = (one, click) => button(T[one].button, () => click(data, done), { id: `act-${one}`, class: one === "resolve" ? "primary" : null });
  const found = [];
  if (record.state === "broken") return [act("repair", repair)];
  if (record.state === "in_doubt" || (record.state === "failed" && record.effect !== "not_applied") || (record.state === "done" && record.result_missing)) found.push(act("resolve", resolve));
  if (record.state === "paused" || (record.state === "running" && record.resume_at)) found.push(act("resume", resume));
  if (record.state === "running") found.push(act("release", release));
  if (["done", "failed"].includes(record.state)) found.push(act("reopen", reopen));
  return found;
}

const seen = (record) => ({ fence: record.fence, generation: record.generation });
const send = (record, action, body) => post(`records/${record.id}/${action}`, { ...seen(record), ...body });

// -- resolve -----------------------------------------------------------------------------------------------------------

const early = (record) => Boolean(record.no_later_than) && Date.parse(record.no_later_than) > now();

/** A task that makes its calls itself goes on after the one that is settled: there a person answers for the call. */
const inQuestion = (record) => (record.call_style === "body" ? [] : record.doubtful);

function resolveFields(record, answers, call) {
  const names = record && !call ? inQuestion(record) : [];
  return [
    options("answer", answers),
    names.length
      ? labelled(T.resolve.call, h("select", { name: "call" }, ...names.map((name) => h("option", { value: name }, name)), h("option", { value: "" }, T.resolve.whole)))
      : "",
    labelled(T.resolve.reference, h("input", { name: "reference", autocomplete: "off", spellcheck: "false" })),
    labelled(T.resolve.result, h("textarea", { name: "result", rows: 2, spellcheck: "false" })),
    record && early(record) ? h("label", { class: "check" }, h("input", { type: "checkbox", name: "force" }), T.resolve.force) : "",
  ];
}

function resolveWill(values, call = values.call) {
  const W = T.resolve.will;
  if (!values.answer) return T.choose;
  if (values.answer === "happened") return call ? W.happenedCall : values.result?.trim() ? W.happened : W.happenedNoResult;
  if (values.answer === "did_not_happen") return call ? W.did_not_happenCall : W.did_not_happen;
  return W.failed;
}

function resolveBody(values, call = values.call) {
  const body = { answer: values.answer, reason: values.reason, reference: values.reference?.trim() || null, force: Boolean(values.force) && values.answer === "did_not_happen" };
  if (call && call !== "body" && values.answer !== "failed") body.call = call;
  if (values.answer === "happened" && values.result?.trim()) {
    try {
      body.result = JSON.parse(values.result);
    } catch {
      throw Object.assign(new Error(T.resolve.badJson), { status: 0 });
    }
  }
  return body;
}

function answersFor(record) {
  return record.state === "in_doubt" ? T.resolve.answer : { happened: T.resolve.answer.happened };
}

export function resolve(data, done, call) {
  const { record, questions } = data;
  ask({
    title: call ? `${T.resolve.title} — ${call}` : T.resolve.title,
    fields: resolveFields(record, answersFor(record), call),
    will: (values) => [resolveWill(values, call), questions.length ? T.resolve.form : "", record.observed ? T.resolve.observed : ""].filter(Boolean).join(" "),
    go: T.resolve.go,
    async send(values) {
      const answer = await send(record, "resolve", { ...resolveBody(values, call), as_of: record.as_of });
      await answerForms(record.id, questions, values);
      return answer;
    },
    done,
  });
}

/** The parked task's form gets the same answer, by whoever gave it; without it, the task finds the answer in the ledger. */
async function answerForms(id, questions, values) {
  if (!questions.length || (await get(`records/${id}`)).record.state === "in_doubt") return; // other calls are still unknown
  for (const asked of questions) {
    const parts = [asked.dag_id, asked.run_id, asked.task_id].map(encodeURIComponent);
    const path = `dags/${parts[0]}/dagRuns/${parts[1]}/taskInstances/${parts[2]}/${asked.map_index}/hitlDetails`;
    try {
      await airflow("PATCH", path, {
        chosen_options: [ANSWERS[values.answer]],
        params_input: { reference: values.reference ?? "", result: values.answer === "happened" ? values.result ?? "" : "", reason: values.reason },
      });
      note(T.resolve.formDone);
    } catch (error) {
      if (![404, 409].includes(error.status)) note(T.resolve.formNot(error.message), "bad"); // answered, or no longer parked
    }
  }
}

export function resolveMany(records, done) {
  ask({
    title: T.resolve.title,
    fields: [
      h("p", {}, T.resolve.many(records.length, stake(records).map(([currency, sum]) => money(sum, currency)).join(", "))),
      h("ul", { class: "names" }, ...records.map((record) => h("li", { id: `chosen-${record.id}` }, record.key))),
      ...resolveFields(null, T.resolve.answer),
    ],
    will: (values) => resolveWill(values),
    go: T.resolve.go,
    async send(values, wrong) {
      const body = resolveBody(values);
      const refused = [];
      for (const record of records) {
        const place = document.getElementById(`chosen-${record.id}`);
        if (place.dataset.done) continue;
        try {
          const current = await get(`records/${record.id}`);
          const calls = values.answer === "failed" ? [] : inQuestion(current.record);
          for (const call of calls.length ? calls : [undefined]) await send(record, "resolve", { ...body, call, as_of: record.as_of });
          place.dataset.done = "1";
          place.append(" ✓");
          await answerForms(record.id, current.questions, values);
        } catch (error) {
          refused.push(`${record.key}: ${error.message}`);
        }
      }
      const said = T.resolve.manyDone(records.length - refused.length, refused.length);
      if (!refused.length) return { said };
      await done();
      wrong.replaceChildren();
      throw Object.assign(new Error(`${said} ${refused.slice(0, 5).join(" ")}${refused.length > 5 ? " …" : ""}`), { status: 0 });
    },
    done,
  });
}

// -- the others --------------------------------------------------------------------------------------------------------

function reopen({ record }, done) {
  const risky = record.effect !== "not_applied" || record.state === "done";
  ask({
    title: T.reopen.title,
    fields: [risky ? h("label", { class: "check" }, h("input", { type: "checkbox", name: "again_although_applied", required: true }), T.reopen.applied) : ""],
    will: () => T.reopen.will,
    go: T.reopen.go,
    danger: risky,
    send: (values) => send(record, "reopen", { reason: values.reason, again_although_applied: Boolean(values.again_although_applied) }),
    done,
  });
}

/** Items of a batch: those given, or all of one state where none are. */
export function reopenItems({ record }, done, items, state) {
  const applied = (call) => call.effect !== "not_applied";
  const named = items.slice(0, 50).map((call) => h("li", {}, call.name));
  const danger = items.length ? items.some(applied) : true;
  ask({
    title: T.reopenItems.title,
    fields: [
      items.length
        ? h("ul", { class: "names" }, ...named, items.length > named.length ? h("li", {}, T.reopenItems.more(items.length - named.length)) : "")
        : h("p", {}, T.reopenItems.all[state]),
      danger
        ? h("label", { class: "check" }, h("input", { type: "checkbox", name: "again_although_applied", required: items.length > 0 && items.every(applied) }), T.reopen.applied)
        : "",
    ],
    will: (values) => [T.reopenItems.will, danger && !values.again_although_applied ? ` ${T.reopenItems.left}` : ""].join(""),
    go: T.reopenItems.go,
    danger,
    send: (values) =>
      send(record, "items/reopen", {
        ...(items.length ? { items: items.map((call) => call.name) } : { state }),
        reason: values.reason,
        again_although_applied: Boolean(values.again_although_applied),
      }),
    done,
  });
}

function release({ record }, done) {
  ask({
    title: T.release.title,
    will: () => T.release.will(record.open_calls > 0),
    go: T.release.go,
    danger: record.open_calls > 0,
    send: (values) => send(record, "release", { reason: values.reason }),
    done,
  });
}

function resume({ record }, done) {
  ask({ title: T.resume.title, will: () => T.resume.will, go: T.resume.go, send: (values) => send(record, "resume", { reason: values.reason }), done });
}

function repair({ record }, done) {
  ask({
    title: T.repair.title,
    fields: [h("p", {}, record.broken), h("p", { class: "muted" }, T.repair.told), options("state", T.repair.choice)],
    will: (values) => T.repair.will[values.state] ?? T.choose,
    go: T.repair.go,
    danger: true,
    send: (values) => post(`records/${record.id}/repair`, { seen: record.seen, state: values.state || null, reason: values.reason }),
    done,
  });
}
