// The page works without this. It keeps the part with the id live up to date.
"use strict";
(() => {
  const live = document.getElementById("live");
  if (!live || !live.dataset.stream) return;
  const connection = document.getElementById("connection");
  const say = (text) => { if (connection) connection.textContent = text; };
  const show = (html) => {
    // What has the focus keeps it: it is found again by its place.
    const all = "a, [tabindex]";
    const at = [...live.querySelectorAll(all)].indexOf(document.activeElement);
    live.innerHTML = html;
    if (at >= 0) live.querySelectorAll(all)[at]?.focus({ preventScroll: true });
  };
  const source = new EventSource(live.dataset.stream);
  source.onopen = () => say("Live.");
  source.onmessage = (event) => show(event.data);
  source.addEventListener("end", (event) => { source.close(); show(event.data); });
  source.onerror = () => say(source.readyState === EventSource.CLOSED ? "Not live: load the page again." : "Connecting …");
})();
