// Package idempotency lets a request that carries a key take effect once: the
// first one does the work, every repetition gets the same answer.
//
//	caller := func(r *http.Request) (string, error) { return userOf(r), nil }
//	protect, err := idempotency.NewMiddleware(store, caller, idempotency.MiddlewareConfig{})
//	http.Handle("POST /payments", authenticated(protect(payments)))
//
// The scope (caller) keeps the keys of one caller apart from those of another. With
// [GlobalScope] the caller must be in FingerprintParts: without either, whoever
// sends a key of somebody else gets that answer, so NewMiddleware refuses it
// ([UnsafeGlobalScope] where there is one caller alone).
//
// Work that does not come over HTTP calls [Do]. The store is Postgres, alone or behind
// Redis (idempotencypgx), Redis (idempotencyredis) or memory (idempotencytest). Who
// implements another one finds the contract in idempotency/driver.
//
// # Keys
//
// A key is a UUID v4 in 32 lowercase hex digits, quoted or not. A UUID as uuidgen prints it,
// with hyphens, is refused, unless MiddlewareConfig.ParseKey is another grammar:
//
//	ParseKey     the default
//	ParseUUID    a UUID of any version in any usual form; all forms of one are one key
//	ParseOpaque  1 to 255 visible characters, quoted or not, kept as their hash
//
// `uuidgen | tr -d - | tr A-F a-f` prints a key for each of them, and so does
// [NewKey]. [RequireKey] in front of a rate limit refuses a malformed key before the
// request is charged.
//
// # The life of a key
//
// A key is unknown, in progress, or completed. The first request with an unknown key
// acquires it under a lease (30 s in the stores at hand) and runs the handler; the lease
// is renewed every third of it. The response is stored before the client sees a byte of
// it. For 48 h every later request gets it, marked with Idempotency-Replayed: true.
//
// A process that dies leaves a lease that runs out; then the next request with the key
// does the work. A run that loses its lease (the store lost it, or could not be reached
// for the whole of it) has its context cancelled with cause [ErrLeaseLost], and its token
// can neither complete nor release the key any more.
//
// A client that hangs up ends nothing: the context of the handler is not cancelled with that of the
// request, so that the work is finished and its answer kept. What bounds the work is a deadline of
// the request's context, as of an http.TimeoutHandler around the middleware (inside, it would answer
// while the work goes on). The timeouts of http.Server set none. Shutdown of http.Server waits for
// the work; Close, and a BaseContext that is cancelled, do not end it.
//
// A handler that writes nothing means 200. One that writes nothing after its context has ended, by a
// deadline or a lost lease, has not answered: unless MarkEffect was called the key is free, as after
// a panic, and a client that is still there gets 503.
//
// # Answers of the middleware
//
//	400 IDEMPOTENCY_KEY_REQUIRED        the request needs a key, there is none
//	400 IDEMPOTENCY_KEY_INVALID         not a key (see MiddlewareConfig.ParseKey), or several
//	409 IDEMPOTENCY_KEY_IN_USE          in progress; Retry-After is the lease left
//	409 IDEMPOTENCY_RESULT_UNAVAILABLE  it ran, its response could not be kept
//	413 REQUEST_TOO_LARGE               the body is above the limit
//	422 IDEMPOTENCY_KEY_REUSED          the key belongs to another request
//	503 IDEMPOTENCY_STORE_UNAVAILABLE   the store is down, and the handler did not run; or it was cut short
//	400 INVALID_REQUEST                 the body broke off
//	500 INTERNAL                        the scope failed; the log says why
//
// They are application/problem+json with these words in the member code, and a link to
// what they mean in type (MiddlewareConfig.Documentation); the errors of this package carry the same code and status.
//
// A request is the same request when its fingerprint is: method, path as the client sent
// it, sorted query, media type, what FingerprintParts adds, and the body. The host is no
// part of it: a service of several hosts puts it into the scope. Bodies count byte by
// byte, JSON ones in a canonical form if CanonicalJSON says so, multipart ones without their boundary. Bodies that were summed in
// different ways are not compared; everything else always is.
//
// # What is kept
//
// Every status but 5xx, 401, 408, 425, 429 and 499, or what Keep calls final. After any other
// status, and after a panic, the key is free and the same key runs the handler again, so
// such an answer must mean that nothing was done. A handler that has sent a payment, or
// anything else that cannot be taken back, calls [MarkEffect] first: from then on its key
// is never free again, whatever it answers. Of the headers an allow-list is kept; cookies,
// credentials, dates, CORS and rate limits never are.
//
// A response that is too large, shorter than its Content-Length, flushed while it
// is written, or hijacked cannot be kept. It is sent, and a tombstone remembers
// that the work was done: later requests get 409 IDEMPOTENCY_RESULT_UNAVAILABLE,
// never a second run. Informational (1xx) responses of the handler are dropped;
// its trailers are sent with the first answer, and not kept. Deadlines of the
// connection work through http.ResponseController; what the server cannot do is
// http.ErrNotSupported.
//
// A response that the store does not take within half a second of tries is sent to the
// client all the same, and the key stays taken until its lease ends.
//
// # When the store is down
//
// A store with another one behind it, as an idempotencypgx.Store with a gate, goes on
// with that. Where nothing can be asked the answer is 503, or FailOpen lets a route run
// without protection, which the header Idempotency-Bypassed and the metrics show. A record
// that the store cannot read may mean that the work was done: the answer is 503, and nothing
// else decides.
//
// # Parts of the work
//
// A downstream call needs a key of its own. [ChildKey] derives one that is the
// same in every run of the key, so that a run after a crash repeats the call
// with the key of the first one.
//
// # Observation
//
// The metrics holdfast.idempotency.requests and holdfast.idempotency.duration by result,
// holdfast.idempotency.active and holdfast.idempotency.fallbacks. Keys are logged as
// hashes. A fault that repeats is logged every 10 s, with how many lines were skipped.
//
// # Limits
//
// A store beside the business database cannot survive every crash: if the
// process dies after the business transaction committed and before the record
// is stored, or if the store forgets, the key runs again. The Store of idempotencypgx
// closes this gap by storing the record in the business transaction itself.
//
// Bodies are read into memory up to their limit before the handler runs, and a kept
// response stays there until it is sent. ReadTimeout and WriteTimeout of http.Server bound
// how slowly a client may send the one and read the other.
package idempotency
