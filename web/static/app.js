// The page renews itself when something of it has changed: xmigd's events come over one connection, the page is fetched
// again, and what differs is taken over in place. Without this file every page still shows everything and every form works.
"use strict";
document.documentElement.classList.add("js");

(() => {
  const badge = document.getElementById("stale");
  let lastId = "";
  // Two things are to be there, and neither says anything of the other: a page that was requested while xmigd was there
  // may come after the word that it is gone.
  const gone = { events: false, page: false };

  function is(what, away, at = new Date()) {
    gone[what] = away;
    const stale = gone.events || gone.page;
    if (stale === !badge.hidden) return;
    document.body.classList.toggle("is-stale", stale);
    badge.hidden = !stale;
    badge.replaceChildren();
    if (!stale) return;
    const time = document.createElement("time");
    time.dateTime = at.toISOString();
    time.textContent = at.toTimeString().slice(0, 8);
    badge.append("Stale since ", time, ": no connection to xmigd; trying again");
  }

  // The extension makes a new source after some errors, and a new source does not know the last event by itself.
  htmx.createEventSource = (url) => {
    const source = new EventSource(lastId ? `${url}&last=${encodeURIComponent(lastId)}` : url);
    source.addEventListener("change", (event) => { lastId = event.lastEventId; });
    source.addEventListener("error", () => is("events", true));
    source.addEventListener("down", (event) => is("events", true, new Date(Number(event.data) * 1000)));
    source.addEventListener("up", () => is("events", false));
    source.addEventListener("denied", () => location.reload());
    return source;
  };

  // What a person is in the middle of stays as it is: an opened part, a form with what it says of the version that was
  // seen when it was begun, a chart, what they were sent.
  document.addEventListener("input", (event) => event.target.form?.setAttribute("data-touched", ""));
  const theirs = (node) => node.localName === "form" && (node.hasAttribute("data-touched") || node.closest("details[open]"));
  const keeping = {
    beforeNodeMorphed: (old) => !(old instanceof Element && (theirs(old) || (old.hasAttribute("data-keep") && old.hasChildNodes()))),
    beforeAttributeUpdated: (name, node) => !(name === "open" && node.localName === "details"),
  };

  function morph(style, target, fragment) {
    if (style !== "morph") return false;
    const next = fragment.querySelector("#live");
    if (next === null) {  // no such page any more: logged out, or gone
      location.reload();
      return [];
    }
    const made = Idiomorph.morph(target, next, { morphStyle: "outerHTML", ignoreActiveValue: true, callbacks: keeping });
    document.dispatchEvent(new Event("xmig:renewed"));
    return made;
  }

  htmx.defineExtension("morph", { isInlineSwap: (style) => style === "morph", handleSwap: morph });
  document.body.addEventListener("htmx:sendError", () => is("page", true));
  document.body.addEventListener("htmx:responseError", () => is("page", true));
  document.body.addEventListener("htmx:beforeSwap", (event) => { if (event.detail.shouldSwap) is("page", false); });
})();
