// The buttons that inject faults.
import { describe, get, newKey, post, trouble } from "./api.js";
import { openEvent, refresh, shownEvent } from "./buying.js";

const $ = (id) => document.getElementById(id);
const pause = (ms) => new Promise((done) => setTimeout(done, ms));

// Runs job(0) … job(count - 1), some at a time, and returns what they returned.
const crowd = async (count, width, job) => {
  const results = [];
  let next = 0;
  const worker = async () => {
    while (next < count) results.push(await job(next++));
  };
  await Promise.all(Array.from({ length: width }, worker));
  return results;
};

const element = (name, text, className = "") => {
  const node = document.createElement(name);
  node.textContent = text;
  node.className = className;
  return node;
};

// A table of the number of each answer.
const tally = (title, answers) => {
  const counts = new Map();
  for (const a of answers) {
    const kind = describe(a) + (a.replayed ? ", replayed" : "");
    counts.set(kind, (counts.get(kind) ?? 0) + 1);
  }
  const table = document.createElement("table");
  table.createCaption().textContent = title;
  for (const [kind, count] of [...counts].sort()) {
    const row = table.insertRow();
    const head = element("th", kind);
    head.scope = "row";
    row.append(head, element("td", count, "number"));
  }
  return table;
};

const show = (...nodes) => $("result").replaceChildren(...nodes);

// Waits until the read model has all reservations, at most a minute, and returns it.
const heardOf = async (event, reservations) => {
  let stats = null;
  for (const end = Date.now() + 60_000; Date.now() < end; await pause(200)) {
    const answer = await get(`/api/events/${event}/stats`);
    if (answer.status !== 200) continue;
    stats = answer.json;
    if (stats.held + stats.confirmed + stats.cancelled + stats.expired >= reservations) break;
  }
  return stats;
};

const burst = async () => {
  const buyers = 200;
  const count = 50;
  show(element("p", `${buyers} buyers want ${count} seats …`));
  const event = await openEvent("Rush", count);
  if (!event) return show(element("p", "No event could be opened. Try again in a while.", "problem"));
  const run = newKey().slice(0, 8);
  const answers = await crowd(buyers, 20, (n) => post(`buyer-${run}-${n}`, "/api/reservations", { event_id: event.id, quantity: 1 }));
  refresh();
  const table = tally(`${buyers} buyers, ${count} seats`, answers);
  const sold = answers.filter((a) => a.status === 201).flatMap((a) => a.json.seats);
  show(table, element("p", "Waiting for the read model …"));
  const stats = await heardOf(event.id, sold.length);
  const heard = stats ? stats.held + stats.confirmed : 0;
  const oversold = sold.length - new Set(sold).size + Math.max(0, heard - count);
  const summary = element("p", `oversold: ${oversold}`, oversold ? "problem" : "done");
  summary.id = "oversold";
  show(table, summary, element("p", `${sold.length} seats sold, ${heard} reservations in the read model.`));
};

// Repeats a request with the same key while it is in progress, at most a minute.
const insist = async (request) => {
  const began = Date.now();
  for (;;) {
    const answer = await request();
    if (answer.code !== "IDEMPOTENCY_KEY_IN_USE" || Date.now() - began > 60_000) return answer;
    await pause(100);
  }
};

const duplicates = async () => {
  const copies = 50;
  if (!shownEvent() && !await openEvent("Concert")) return;
  const key = newKey();
  const body = { event_id: shownEvent(), quantity: 1 };
  show(element("p", `One request is sent ${copies} times …`));
  const answers = await crowd(copies, copies, () => insist(() => post(`again-${key.slice(0, 8)}`, "/api/reservations", body, key)));
  refresh();
  const made = new Set(answers.filter((a) => a.status === 201).map((a) => a.json.id));
  const texts = new Set(answers.filter((a) => a.status === 201).map((a) => a.text));
  const summary = element("p", `reservations made: ${made.size}`, made.size > 1 ? "problem" : "done");
  summary.id = "effects";
  show(tally(`One request, ${copies} times`, answers), summary, element("p", texts.size > 1 ? "The answers differ." : "All got the same answer."));
};

const poison = async () => {
  const answer = await trouble("poison");
  show(answer.status === 204
    ? element("p", "The consumer gets a message that no attempt can process. It becomes a dead letter; other messages go on.")
    : element("p", `It could not be sent: ${describe(answer)}`, "problem"));
};

// Runs a function on click, once at a time.
const onClick = (button, run) => button.addEventListener("click", async () => {
  if (button.getAttribute("aria-busy") === "true") return;
  button.setAttribute("aria-busy", "true");
  try { await run(button); } finally { button.removeAttribute("aria-busy"); }
});

const pressed = (button) => button.getAttribute("aria-pressed") === "true";

const flip = async (button, what, fields, text) => {
  const on = !pressed(button);
  const answer = await trouble(what, { ...fields, on });
  if (answer.status !== 204) return show(element("p", `It could not be switched: ${describe(answer)}`, "problem"));
  button.setAttribute("aria-pressed", String(on));
  show(element("p", text(on)));
};

const servers = () => document.querySelectorAll("[data-server]");

// Real servers have no buttons. Their consumers may be other processes, without the flag.
const consumers = () => servers().length ? "Consumers" : "Consumers with -trials";

export const startTrials = () => {
  onClick($("burst"), burst);
  onClick($("duplicates"), duplicates);
  onClick($("poison"), poison);
  onClick($("slow"), (b) => flip(b, "slow", {}, (on) => on ? `${consumers()} take two seconds for each message.` : `${consumers()} are as fast as they can be.`));
  for (const button of servers()) {
    const name = button.textContent.replace(" off", "");
    onClick(button, (b) => flip(b, "outage", { server: b.dataset.server }, (on) => on
      ? `${name} is switched off. Buy something, and switch it on again.` : `${name} is back.`));
  }
};

// Another page may have injected the faults.
export const showBroken = ({ slow, off }) => {
  $("slow").setAttribute("aria-pressed", String(slow));
  for (const button of servers()) button.setAttribute("aria-pressed", String(off[button.dataset.server] ?? false));
};
