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

/** Draws anew only what changed, so that nothing jumps or loses its focus. */
export function drawer(place, draw) {
  let before = "";
  return (data) => {
    const after = JSON.stringify(data, (name, value) => (name === "now" ? undefined : value));
    if (after === before) return;
    before = after;
    const open = new Set([...place.querySelectorAll("details[open][id]")].map((one) => one.id));
    const at = document.activeElement?.id;
    place.replaceChildren(...[draw(data)].flat(Infinity).filter(Boolean));
    for (const id of open) document.getElementById(id)?.setAttribute("open", "");
    if (at) document.getElementById(at)?.focus({ preventScroll: true });
  };
}
