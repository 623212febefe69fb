// Shows the stream: the work of the shop, and the rest of the limits.
const $ = (id) => document.getElementById(id);

const set = (id, value) => {
  const node = $(id);
  if (node && node.textContent !== String(value)) node.textContent = value;
};

// An unknown count is shown as a question mark.
const showCounts = ({ counts, backlog }) => {
  for (const stage of ["request", "transaction", "published", "processed", "updated"]) set(`count-${stage}`, counts ? counts[stage] ?? 0 : "?");
  for (const place of ["outbox", "queue", "dead"]) set(`count-${place}`, backlog[place] ?? "?");
};

let shown = 0; // the number of the last step

const showSteps = (steps) => {
  if (!steps) return;
  const list = $("steps");
  if (shown > (steps.at(-1)?.number ?? 0)) { // the shop was restarted
    shown = 0;
    list.replaceChildren();
  }
  for (const { number, at, stage, text } of steps) {
    if (number <= shown) continue;
    shown = number;
    const item = document.createElement("li");
    item.textContent = `${new Date(at).toLocaleTimeString([], { hour12: false })} ${stage}: ${text}`;
    list.prepend(item);
  }
  while (list.children.length > 40) list.lastChild.remove();
};

const gauges = new Map();

const showLimits = (limits) => {
  if (!limits) {
    gauges.clear();
    $("limits").textContent = "Unknown: Redis is unreachable.";
    return;
  }
  if (!gauges.size) $("limits").textContent = "";
  for (const { name, left, max, reset } of limits) {
    if (!gauges.has(name)) {
      const line = document.createElement("p");
      const meter = document.createElement("meter");
      const label = name === "user" ? "you" : name === "global" ? "all users" : name;
      meter.setAttribute("aria-label", `Left for ${label}`);
      const text = document.createElement("span");
      line.append(`For ${label}: `, meter, " ", text);
      $("limits").append(line);
      gauges.set(name, { meter, text });
    }
    const { meter, text } = gauges.get(name);
    Object.assign(meter, { min: 0, max, low: max / 4, value: left });
    text.textContent = `${left} of ${max}${left < max ? `, more in ${Math.ceil(reset)} s` : ""}`;
  }
};

let source = null;
let begin = () => {};

// Follows the shop for a user. onTrials gets the current faults.
export const follow = (user, onTrials) => {
  begin = () => {
    source?.close();
    source = new EventSource(`/shop/live?user=${encodeURIComponent(user)}`);
    source.onopen = () => set("connection", "Live.");
    source.onerror = () => set("connection", source.readyState === EventSource.CLOSED ? "Not live. Reload the page." : "Connecting …");
    source.onmessage = (message) => {
      const state = JSON.parse(message.data);
      showCounts(state);
      showSteps(state.steps);
      showLimits(state.limits);
      if (state.trials) onTrials(state.trials);
    };
  };
  begin();
};

// A browser has few connections to one address: a hidden page keeps none.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) source?.close();
  else begin();
});
