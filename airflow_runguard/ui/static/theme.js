// The host's colours and fonts, before the first paint and whenever they change. A classic script, since modules run late.
(() => {
  "use strict";
  const COLOURS = {
    "--bg": "bg", "--fg": "fg", "--muted": "fg-muted", "--line": "border",
    "--accent": "fg-info",
  };
  function follow() {
    const own = document.documentElement;
    let dark = window.matchMedia("(prefers-color-scheme: dark)").matches;
    try {
      const host = window.parent.document.documentElement;
      if (window.parent === window) throw new Error("not framed");
      const styles = window.parent.getComputedStyle(host);
      dark = host.classList.contains("dark");
      for (const [mine, theirs] of Object.entries(COLOURS)) {
        const colour = styles.getPropertyValue(`--chakra-colors-${theirs}`).trim();
        if (colour) own.style.setProperty(mine, colour);
        else own.style.removeProperty(mine);
      }
      const font = window.parent.getComputedStyle(window.parent.document.body).fontFamily;
      if (font) own.style.setProperty("--font", font);
    } catch {
      // opened on its own: app.css has colours of ours
    }
    own.classList.toggle("dark", dark);
  }
  follow();
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", follow);
  try {
    new MutationObserver(follow).observe(window.parent.document.documentElement, {
      attributes: true, attributeFilter: ["class", "style"],
    });
  } catch {
    // likewise
  }
})();
