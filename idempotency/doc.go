// Package idempotency makes a request with a key take effect once. The first request does the work;
// every repetition gets the same answer.
//
//	caller := func(r *http.Request) (string, error) { return userOf(r), nil }
//	protect, err := idempotency.NewMiddleware(store, caller, idempotency.MiddlewareConfig{})
//	http.Handle("POST /payments", authenticated(protect(payments)))
//
// The scope (caller) separates the keys of callers. With [GlobalScope] the caller must be in
// FingerprintParts, or NewMiddleware returns an error; [UnsafeGlobalScope] is for a single caller.
// Work outside HTTP calls [Do]. The stores are idempotencypgx, idempotencyredis and
// idempotencytest; package idempotency/driver has the contract for other stores.
//
// # Keys
//
// MiddlewareConfig.ParseKey chooses the grammar. [NewKey] returns a key that all of them accept:
//
//	ParseKey     the default: a UUID v4 in 32 lowercase hex digits, quoted or not
//	ParseUUID    a UUID of any version in any usual form; all forms of one are one key
//	ParseOpaque  1 to 255 visible characters, quoted or not, stored as their hash
//
// [RequireKey] in front of a rate limit rejects a malformed key before it is charged.
//
// # The life of a key
//
// A key is unknown, in progress or completed. The first request acquires the key under a lease of
// 30 s and runs the handler. The lease is renewed every 10 s. The response is stored before its
// first byte is sent. For 48 h every later request gets that response, with the header
// Idempotency-Replayed: true.
//
// After a crash the lease ends, and the next request with the key does the work. If a run loses its
// lease, its context is cancelled with cause [ErrLeaseLost], and it can neither complete nor
// release the key.
//
// A client that disconnects does not cancel the handler. A deadline of the request's context does:
// put http.TimeoutHandler around the middleware. http.Server.Shutdown waits for the work. A handler
// that writes nothing means 200. If its context has ended, the key is freed and the client gets 503
// instead, unless the handler called MarkEffect.
//
// # Answers of the middleware
//
//	400 IDEMPOTENCY_KEY_REQUIRED        the request has no key
//	400 IDEMPOTENCY_KEY_INVALID         malformed, or more than one key
//	400 INVALID_REQUEST                 the body is incomplete
//	409 IDEMPOTENCY_KEY_IN_USE          in progress; Retry-After is the rest of the lease
//	409 IDEMPOTENCY_RESULT_UNAVAILABLE  it ran, but its response was not kept
//	413 REQUEST_TOO_LARGE               the body is above the limit
//	422 IDEMPOTENCY_KEY_REUSED          the key belongs to another request
//	500 INTERNAL                        the scope function failed; see the log
//	503 IDEMPOTENCY_STORE_UNAVAILABLE   the store is down, or the handler was cancelled
//
// They are application/problem+json. The fingerprint of a request has method, path, sorted query,
// media type, FingerprintParts and body, but not the host. Bodies are compared by bytes, JSON in
// canonical form with CanonicalJSON, multipart without the boundary.
//
// # Which responses are kept
//
// Every status except 5xx, 401, 408, 425, 429 and 499 is kept; Keep replaces this rule. After any
// other status, and after a panic, the key is free, so such an answer must mean that nothing was
// done. Call [MarkEffect] before an effect that cannot be undone: its key never runs again.
// [ChildKey] derives a key for a downstream call, the same in every run. Only the headers in
// KeepHeaders are kept.
//
// A response that is too large, incomplete, flushed or hijacked is sent once; later requests get
// 409. 1xx responses are dropped. Trailers are sent, but not kept. If the store does not accept a
// response within about half a second, the client still gets it, and the key stays taken until its
// lease ends. If the store is down, the answer is 503. With FailOpen the route runs unprotected
// instead, and the response has the header Idempotency-Bypassed.
//
// # Limits
//
// A store beside the business database cannot survive every crash. If the process dies between the
// commit and the record, the key runs again. idempotencypgx stores the record in the business
// transaction. Bodies and kept responses are held in memory. Keys are logged as hashes.
package idempotency
