// Package idempotency makes a request that carries a key take effect once: the first
// one does the work, every repetition gets the same answer.
//
//	caller := func(r *http.Request) (string, error) { return userOf(r), nil }
//	protect, err := idempotency.NewMiddleware(store, caller, idempotency.MiddlewareConfig{})
//	http.Handle("POST /payments", authenticated(protect(payments)))
//
// The scope (caller) separates the keys of callers. With [GlobalScope] the caller must be in
// FingerprintParts, or NewMiddleware returns an error; [UnsafeGlobalScope] is for a single caller.
// Work outside HTTP calls [Do]. The store is idempotencypgx, idempotencyredis or
// idempotencytest; idempotency/driver has the contract of another one.
//
// # Keys
//
// MiddlewareConfig.ParseKey chooses the grammar; [NewKey] makes a key of each:
//
//	ParseKey     the default: a UUID v4 in 32 lowercase hex digits, quoted or not
//	ParseUUID    a UUID of any version in any usual form; all forms of one are one key
//	ParseOpaque  1 to 255 visible characters, quoted or not, stored as their hash
//
// [RequireKey] in front of a rate limit rejects a malformed key before it is charged.
//
// # The life of a key
//
// A key is unknown, in progress or completed. The first request acquires it under a lease
// of 30 s, renewed every third of it, and runs the handler. The response is stored before
// the client sees a byte of it. For 48 h every later request gets it, with the header
// Idempotency-Replayed: true.
//
// After a crash the lease ends and the next request with the key does the work. A run that
// loses its lease has its context cancelled with cause [ErrLeaseLost], and can neither
// complete nor release the key.
//
// A client that disconnects does not cancel the handler. A deadline of the request's context
// does: put http.TimeoutHandler around the middleware. http.Server.Shutdown waits for the
// work. A handler that writes nothing means 200, but after the end of its context the key is
// free and the client gets 503, unless it called MarkEffect.
//
// # Answers of the middleware
//
//	400 IDEMPOTENCY_KEY_REQUIRED        the request has no key
//	400 IDEMPOTENCY_KEY_INVALID         not a key, or several
//	400 INVALID_REQUEST                 the body broke off
//	409 IDEMPOTENCY_KEY_IN_USE          in progress; Retry-After is the rest of the lease
//	409 IDEMPOTENCY_RESULT_UNAVAILABLE  it ran, its response could not be kept
//	413 REQUEST_TOO_LARGE               the body is above the limit
//	422 IDEMPOTENCY_KEY_REUSED          the key belongs to another request
//	500 INTERNAL                        the scope failed; the log has the reason
//	503 IDEMPOTENCY_STORE_UNAVAILABLE   the store is down, or the handler was cut short
//
// They are application/problem+json. The fingerprint of a request has method, path, sorted query,
// media type, FingerprintParts and body, but not the host. Bodies are compared by bytes, JSON in
// canonical form with CanonicalJSON, multipart without the boundary.
//
// # What is kept
//
// Every status but 5xx, 401, 408, 425, 429 and 499, or what Keep returns true for. After any
// other status, and after a panic, the key is free, so such an answer must mean that
// nothing was done. Call [MarkEffect] before an effect that cannot be undone: its key never runs
// again. [ChildKey] derives a key for a downstream call, the same in every run. An allow-list of headers is kept.
//
// A response that is too large, incomplete, flushed or hijacked is sent once; later requests
// get 409. 1xx responses are dropped; trailers are sent, not kept. If the store
// does not take a response within half a second, the client gets it, and the key stays taken
// until its lease ends. If the store is down the answer is 503, or with FailOpen the route runs
// unprotected and the header Idempotency-Bypassed shows it.
//
// # Limits
//
// A store beside the business database cannot survive every crash: if the process dies between
// the commit and the record, the key runs again. idempotencypgx stores the record in the
// business transaction. Bodies and kept responses are held in memory. Keys are logged as hashes.
package idempotency
