// One form for everything that changes something: what will happen, a reason, and what was seen. Airflow's frame forbids
// confirm() and alert(); <dialog> works.
import { button, h, note } from "./dom.js";
import { S } from "./strings.js";

/**
 * @param title what is asked
 * @param fields elements; those with a name are what is sent
 * @param will (values) => what will happen
 * @param go the button's text
 * @param send (values) => what the API answers, or a text to show
 */
export function ask({ title, fields = [], will, go, send, done, danger = false }) {
  const reason = h("textarea", { name: "reason", required: true, rows: 2, maxlength: 2000, "aria-describedby": "reason-told" });
  const told = h("p", { class: "will", "aria-live": "polite" });
  const wrong = h("p", { class: "wrong", role: "alert" });
  const confirm = h("button", { class: danger ? "danger" : "primary" }, go);
  const form = h(
    "form",
    { method: "dialog" },
    h("h2", {}, title),
    ...fields,
    h("label", {}, h("span", {}, S.act.reason), reason),
    h("p", { class: "muted small", id: "reason-told" }, S.act.reasonTold),
    h("h3", {}, S.act.will),
    told,
    wrong,
    h("div", { class: "line buttons" }, confirm, button(S.act.cancel, () => dialog.close())),
  );
  const dialog = h("dialog", { "aria-label": title, onclose: () => dialog.remove() }, form);
  const values = () => {
    const found = Object.fromEntries(new FormData(form));
    for (const box of form.querySelectorAll("input[type=checkbox]")) found[box.name] = box.checked;
    return found;
  };
  const foretell = () => told.replaceChildren(will(values()));
  form.addEventListener("input", foretell);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (!reason.value.trim()) {
      reason.setCustomValidity(S.act.reasonTold);
      reason.reportValidity();
      reason.setCustomValidity("");
      return;
    }
    wrong.replaceChildren();
    confirm.disabled = true;
    try {
      const answer = await send(values(), wrong);
      dialog.close();
      if (answer?.said) note(answer.said, "good");
      await done?.();
    } catch (error) {
      wrong.replaceChildren(`${error.message} `, error.remedy ? h("span", { class: "muted" }, error.remedy) : "");
      if (!("status" in error)) console.error(error);
    } finally {
      confirm.disabled = false;
    }
  });
  document.body.append(dialog);
  foretell();
  dialog.showModal();
  (form.querySelector("input, select") ?? reason).focus();
  return dialog;
}

export const labelled = (text, element) => h("label", {}, h("span", {}, text), element);

/** One of several; none is chosen beforehand, unless there is only one. */
export function options(name, words) {
  const all = Object.entries(words);
  return h("fieldset", {}, ...all.map(([value, text]) =>
    h("label", { class: "check" }, h("input", { type: "radio", name, value, checked: all.length === 1, required: true }), text)));
}
