// Looking again, while somebody looks: never in a hidden tab, never under an open dialog.
import { note } from "./dom.js";

export function everySoOften(look, seconds = 5) {
  let away = false;
  const once = async () => {
    if (!document.hidden && !document.querySelector("dialog[open]")) {
      try {
        await look();
        away = false;
      } catch (error) {
        if (!away && error.status !== 401) note(error.message, "bad");
        away = true;
      }
    }
    setTimeout(once, (away ? 6 : 1) * seconds * 1_000);
  };
  setTimeout(once, seconds * 1_000);
}

const REACHED = "a[href], button, input, select, textarea, summary, [tabindex]";
const marks = (one) => [one.id, one.getAttribute("aria-label"), one.getAttribute("href"), one.textContent];

/** Whoever stands on something stays on it, or on what took its place: a link to the same list has another number now. */
export function keepingFocus(place, change) {
  const at = document.activeElement;
  const before = place.contains(at) ? marks(at) : null;
  change();
  if (!before || place.contains(document.activeElement)) return;
  const reached = [...place.querySelectorAll(REACHED)];
  const name = before.findIndex(Boolean);
  const same = reached.find((one) => marks(one).every((mark, n) => mark === before[n])) ?? reached.find((one) => marks(one)[name] === before[name]);
  same?.focus({ preventScroll: true });
}

/** Draws anew only what changed, so that nothing jumps or loses its focus. */
export function drawer(place, draw) {
  let before = "";
  return (data) => {
    const after = JSON.stringify(data, (name, value) => (name === "now" ? undefined : value));
    if (after === before) return;
    before = after;
    const open = new Set([...place.querySelectorAll("details[open][id]")].map((one) => one.id));
    keepingFocus(place, () => {
      place.replaceChildren(...[draw(data)].flat(Infinity).filter(Boolean));
      for (const id of open) document.getElementById(id)?.setAttribute("open", "");
    });
  };
}
