// The page works without this script. It updates the element with the id live.
"use strict";
(() => {
  // A view that is still being read is reloaded, unless somebody types.
  if (document.querySelector("[data-reload]")) {
    const typing = () => document.activeElement?.matches("input, select, textarea");
    setInterval(() => { if (!typing()) location.reload(); }, 1500);
  }
  const live = document.getElementById("live");
  if (!live || !live.dataset.stream) return;
  const connection = document.getElementById("connection");
  const say = (text) => { if (connection) connection.textContent = text; };
  // The title and the icon of the tab show how many problems there are.
  const icon = document.querySelector('link[rel="icon"]');
  const name = document.title.replace(/^\(\d+\) /, "");
  const mark = () => {
    const verdict = live.querySelector("[data-problems]");
    if (!verdict) return;
    const count = Number(verdict.dataset.problems);
    document.title = count ? `(${count}) ${name}` : name;
    icon.href = count ? "icon-bad.svg" : "icon.svg";
  };
  const show = (html) => {
    // The focused element is found again by its position, and unfolded parts stay unfolded.
    const all = "a, summary, [tabindex]";
    const at = [...live.querySelectorAll(all)].indexOf(document.activeElement);
    const unfolded = [...live.querySelectorAll("details[open]")].map((d) => d.id);
    const next = document.createElement("template");
    next.innerHTML = html;
    for (const id of unfolded) next.content.getElementById(id)?.setAttribute("open", "");
    // Parts that are the same stay, so that a title over a chart stays, too.
    const now = [...live.children], then = [...next.content.children];
    if (now.length !== then.length) live.replaceChildren(...then);
    else now.forEach((part, i) => { if (!part.isEqualNode(then[i])) part.replaceWith(then[i]); });
    mark();
    if (at >= 0) live.querySelectorAll(all)[at]?.focus({ preventScroll: true });
  };
  // Figures without an update for a while look old: the service may have ended.
  let patience;
  const age = () => {
    live.classList.add("old");
    document.title = `(?) ${name}`;
  };
  const renew = () => {
    clearTimeout(patience);
    if (live.classList.contains("old")) document.title = name;
    live.classList.remove("old");
    patience = setTimeout(age, 30000);
  };
  renew();
  const source = new EventSource(live.dataset.stream);
  source.onopen = () => say("Live.");
  source.onmessage = (event) => { renew(); show(event.data); };
  source.addEventListener("end", (event) => { source.close(); renew(); clearTimeout(patience); show(event.data); });
  source.onerror = () => {
    const ended = source.readyState === EventSource.CLOSED;
    say(ended ? "Not live. Reload the page." : "Connecting …");
    if (ended) age();
  };
})();
