// Shared by all requests to the shop: a POST has a user and an idempotency key.

// A UUID v4 in lowercase without hyphens. crypto.randomUUID would need HTTPS beyond this machine.
export const newKey = () => {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  bytes[6] = (bytes[6] & 0x0f) | 0x40;
  bytes[8] = (bytes[8] & 0x3f) | 0x80;
  return [...bytes].map((b) => b.toString(16).padStart(2, "0")).join("");
};

const read = async (response) => {
  const text = await response.text();
  let json = null;
  try { json = JSON.parse(text); } catch { /* the status says enough */ }
  return {
    status: response.status, text, json, code: json?.code ?? "",
    replayed: response.headers.get("Idempotency-Replayed") === "true",
    retryAfter: response.headers.get("Retry-After"),
    rateLimit: response.headers.get("RateLimit"),
  };
};

const unreachable = () => ({ status: 0, text: "", json: null, code: "NO ANSWER", replayed: false });

const send = async (path, options) => {
  try { return await read(await fetch(path, options)); } catch { return unreachable(); }
};

export const get = (path) => send(path, { headers: { Accept: "application/json" } });

// The request is part of the result, so that it can be sent again.
export const post = async (user, path, body, key = newKey()) => {
  const text = JSON.stringify(body);
  const answer = await send(path, {
    method: "POST", body: text,
    headers: { "Content-Type": "application/json", "X-Mock-User-Id": user, "Idempotency-Key": key },
  });
  return { ...answer, request: { user, path, body, key, text } };
};

// Addresses outside the API, for this page only.
export const trouble = (what, fields = {}) => send(`/shop/${what}`, { method: "POST", body: new URLSearchParams(fields) });

export const describe = (answer) => answer.status === 0 ? "no answer" : `${answer.status}${answer.code ? ` ${answer.code}` : ""}`;
