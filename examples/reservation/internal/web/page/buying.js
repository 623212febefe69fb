// The map of one event, and this visitor's reservations.
import { describe, get, post } from "./api.js";

const $ = (id) => document.getElementById(id);

// maxShown bounds the seats that are drawn.
const maxShown = 500;
const remembered = "reservations";

let event = "";                // the id of the event that is shown
let last = null;               // the last request with its answer
const seats = new Map();       // button by the seat's name
const reservations = new Map(); // by id: the reservation and its list item

export const user = () => $("user").value.trim() || "ada";
export const shownEvent = () => event;

const say = (text, problem = false) => {
  $("status").textContent = text;
  $("status").className = problem ? "problem" : "";
};

const showLast = (answer) => {
  last = answer;
  const r = answer.request;
  const lines = [`POST ${r.path}`, `X-Mock-User-Id: ${r.user}`, `Idempotency-Key: ${r.key}`, r.text, "", describe(answer)];
  if (answer.replayed) lines.push("Idempotency-Replayed: true");
  if (answer.rateLimit) lines.push(`RateLimit: ${answer.rateLimit}`);
  if (answer.retryAfter) lines.push(`Retry-After: ${answer.retryAfter}`);
  lines.push(answer.text.trim());
  $("last").textContent = lines.join("\n");
  $("again").disabled = false;
};

// Sends a request of this visitor, and shows it with its answer.
const ask = async (path, body, done) => {
  const answer = await post(user(), path, body);
  showLast(answer);
  if (answer.status >= 200 && answer.status < 300) {
    keep(answer.json);
    say(done(answer.json));
  } else {
    say(`${describe(answer)}${answer.retryAfter ? `: try again in ${answer.retryAfter} s` : ""}`, true);
  }
  await refresh();
};

const sendAgain = async () => {
  const { user, path, body, key } = last.request;
  const before = last.text;
  const answer = await post(user, path, body, key);
  showLast(answer);
  if (answer.replayed) say(answer.text === before ? "The same answer, and nothing was done twice." : "Answered from the record.");
  else say(describe(answer), answer.status >= 300);
  await refresh();
};

const drawMap = (map) => {
  const shown = map.slice(0, maxShown);
  if (seats.size !== shown.length || shown.some((s) => !seats.has(s.seat))) {
    seats.clear();
    $("map").replaceChildren(...shown.map(({ seat }) => {
      const button = document.createElement("button");
      button.textContent = seat;
      button.addEventListener("click", () => choose(seat, button));
      seats.set(seat, button);
      return button;
    }));
  }
  const mine = new Set();
  for (const { data } of reservations.values()) {
    if (data.event_id === event && (data.status === "held" || data.status === "confirmed")) data.seats.forEach((s) => mine.add(s));
  }
  for (const { seat, state } of shown) {
    const button = seats.get(seat);
    const yours = state !== "free" && mine.has(seat);
    button.className = `seat ${state}${yours ? " mine" : ""}`;
    button.dataset.state = state;
    button.setAttribute("aria-label", `Seat ${seat}, ${state === "confirmed" ? "sold" : state}${yours ? ", yours" : ""}`);
    button.setAttribute("aria-disabled", String(state !== "free"));
  }
};

const choose = async (seat, button) => {
  if (button.dataset.state !== "free") {
    say(`${button.getAttribute("aria-label")}.`);
    return;
  }
  await ask("/api/reservations", { event_id: event, seats: [seat] }, (r) => `${r.seats.join(", ")} is held for you.`);
};

const keep = (data) => {
  if (!data?.status) return;
  const known = reservations.get(data.id);
  if (known) {
    known.data = data;
  } else {
    reservations.set(data.id, { data, item: newItem(data) });
    $("mine").prepend(reservations.get(data.id).item.node);
  }
  try { sessionStorage.setItem(remembered, JSON.stringify([...reservations.keys()].slice(-50))); } catch { /* none is kept */ }
  drawReservations();
};

const newItem = (data) => {
  const node = document.createElement("li");
  node.append(document.createElement("span"));
  const names = data.seats.join(", ");
  const buttons = [["Confirm", "confirm", "is yours"], ["Cancel", "cancel", "is free again"]].map(([label, verb, then]) => {
    const button = document.createElement("button");
    button.textContent = label;
    button.setAttribute("aria-label", `${label} ${names}`);
    button.addEventListener("click", () => ask(`/api/reservations/${data.id}/${verb}`, {}, () => `${names} ${then}.`));
    node.append(button);
    return button;
  });
  return { node, text: node.firstChild, buttons };
};

const drawReservations = () => {
  $("none").hidden = reservations.size > 0;
  for (const { data, item } of reservations.values()) {
    const left = Math.max(0, Math.ceil((Date.parse(data.expires_at) - Date.now()) / 1000));
    const time = left >= 60 ? `${Math.floor(left / 60)}:${String(left % 60).padStart(2, "0")} min` : `${left} s`;
    const text = `${data.seats.join(", ")}: ${data.status}${data.status === "held" ? `, ${time} left` : ""}`;
    if (item.text.textContent !== text) item.text.textContent = text;
    item.buttons.forEach((b) => { b.hidden = data.status !== "held"; });
  }
};

// The time of a hold is over: the shop's status counts.
const askOverdue = async () => {
  for (const { data } of [...reservations.values()]) {
    if (data.status !== "held" || Date.parse(data.expires_at) > Date.now()) continue;
    const answer = await get(`/api/reservations/${data.id}`);
    if (answer.status === 200) keep(answer.json);
  }
};

let refreshing = false;
let again = false;

// Reads the map and the read model. A call during a read repeats it afterwards.
export const refresh = async () => {
  if (!event || refreshing) {
    again = refreshing;
    return;
  }
  refreshing = true;
  const of = event;
  const [map, stats] = await Promise.all([get(`/api/events/${of}`), get(`/api/events/${of}/stats`)]);
  refreshing = false;
  if (of === event && map.status === 200) drawMap(map.json.map);
  if (of === event) showStats(map, stats);
  if (again || of !== event) {
    again = false;
    await refresh();
  }
};

const showStats = (map, stats) => {
  const failed = [map, stats].find((a) => a.status !== 200);
  const s = stats.json;
  const text = failed ? `Shop unavailable (${describe(failed)}). The map is outdated.`
    : `Read model: ${s.held} held, ${s.confirmed} confirmed, ${s.cancelled} cancelled, ${s.expired} expired.`;
  if ($("stats").textContent !== text) $("stats").textContent = text;
};

const listEvents = async () => {
  const all = [];
  for (let after = ""; all.length < 1000;) {
    const page = await get(`/api/events${after ? `?after=${after}` : ""}`);
    if (page.status !== 200) break;
    all.push(...page.json.events);
    if (!page.json.next) break;
    after = page.json.next;
  }
  return all;
};

const addOption = ({ id, name, seats: count }) => {
  if ([...$("event").options].some((o) => o.value === id)) return;
  $("event").prepend(new Option(`${name}, ${count} seats`, id));
};

// Shows an event that is in the list.
export const showEvent = async (data) => {
  if (data) addOption(data);
  event = data?.id ?? $("event").value;
  $("event").value = event;
  await refresh();
};

// Opens an event. It is charged to another user, so that the visitor can still buy.
export const openEvent = async (name, count = 50) => {
  const answer = await post(`box-office-${Date.now()}`, "/api/events", { name, seats: count });
  if (answer.status !== 201) {
    say(`Could not open an event: ${describe(answer)}`, true);
    return null;
  }
  await showEvent(answer.json);
  return answer.json;
};

const recall = async () => {
  let ids = [];
  try { ids = JSON.parse(sessionStorage.getItem(remembered) ?? "[]"); } catch { /* none was kept */ }
  for (const id of ids) {
    const answer = await get(`/api/reservations/${id}`);
    if (answer.status === 200) keep(answer.json);
  }
};

export const startBuying = async (opensEvent) => {
  $("again").addEventListener("click", sendAgain);
  $("event").addEventListener("change", () => showEvent());
  $("new-event").addEventListener("click", () => openEvent("Concert"));
  setInterval(() => {
    if (document.hidden) return;
    drawReservations();
    askOverdue();
    refresh();
  }, 1000);
  (await listEvents()).forEach(addOption);
  await recall();
  if ($("event").options.length > 0) await showEvent();
  else if (opensEvent) await openEvent("Concert");
};
