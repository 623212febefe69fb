// Package idempotency lets a request that carries a key take effect once: the
// first one does the work, every repetition gets the same answer.
//
//	protect, err := idempotency.NewMiddleware(store, idempotency.MiddlewareConfig{
//		Scope: func(r *http.Request) (string, error) { return userOf(r), nil },
//	})
//	http.Handle("POST /payments", authenticated(protect(payments)))
//
// The scope keeps the keys of one caller apart from those of another. With
// [GlobalScope] the caller must be in FingerprintParts: without either, whoever
// sends a key of somebody else gets that answer.
//
// Work that does not come over HTTP calls [Do]. The store is Redis
// (idempotencyredis), Postgres (idempotencypgx) or memory (idempotencytest).
//
// # Keys
//
// A key is a UUID v4 in 32 lowercase hex digits. A UUID as uuidgen prints it, with
// hyphens, is refused: `uuidgen | tr -d - | tr A-F a-f` prints a key, and so does
// [NewKey]. [RequireKey] in front of a rate limit refuses what is no key before it is
// charged.
//
// # The life of a key
//
// A key is unknown, in progress, or completed. The first request with an
// unknown key acquires it under a lease (30 s in the stores at hand), and runs
// the handler; meanwhile the lease is renewed every third of it. The response
// is stored before the client sees a byte of it, and every later request gets
// it, marked with Idempotency-Replayed: true, for 48 h.
//
// A process that dies leaves a lease that runs out; then the next request with
// the key does the work. A process that loses its lease while it is alive (the
// store lost it, or could not be reached for the whole of it) finds the
// handler's context cancelled with cause [ErrLeaseLost], and its token can
// neither complete nor release anything any more.
//
// # Answers of the middleware
//
//	400 IDEMPOTENCY_KEY_REQUIRED        the request needs a key, there is none
//	400 IDEMPOTENCY_KEY_INVALID         not a key (see ParseKey), or several
//	409 IDEMPOTENCY_KEY_IN_USE          in progress; Retry-After is the lease left
//	409 IDEMPOTENCY_RESULT_UNAVAILABLE  it ran, its response could not be kept
//	413 REQUEST_TOO_LARGE               the body is above the limit
//	422 IDEMPOTENCY_KEY_REUSED          the key belongs to another request
//	503 IDEMPOTENCY_STORE_UNAVAILABLE   the store is down; the handler did not run
//	400 INVALID_REQUEST                 the body broke off
//	500 INTERNAL                        Scope failed; the log says why
//
// They are application/problem+json with these words in the member code. Which
// requests need a key is said by MiddlewareConfig.Need ([DefaultNeed]: POST, PUT
// and PATCH). A request is the same request when its [Fingerprint] is: method,
// path as the client sent it, sorted query, media type, what FingerprintParts
// adds, and the body. The host is no part of it: a service of several hosts
// puts it into the scope. Bodies count byte by byte, JSON ones in a canonical
// form if CanonicalJSON says so; a body that was summed the one way is not
// compared with one that was summed the other way, everything else always is.
//
// # What is kept
//
// Statuses that [DefaultKeep], or a policy of yours, calls final. After any
// other one, and after a panic, the key is free and the same key runs the
// handler again, so such an answer must mean that nothing was done. A handler
// that has sent a payment, or anything else that cannot be taken back, says so
// with [MarkEffect]: then its key is never free again, whatever it answers. Of
// the headers an allow-list is kept; cookies, credentials, dates, CORS and rate
// limits never are.
//
// A response that is too large, shorter than its Content-Length, flushed while it
// is written, or hijacked cannot be kept. It is sent, and a tombstone remembers
// that the work was done: later requests get 409 IDEMPOTENCY_RESULT_UNAVAILABLE,
// never a second run. Informational (1xx) responses of the handler are dropped;
// its trailers are sent with the first answer, and not kept. Deadlines of the
// connection work through http.ResponseController; what the server cannot do is
// http.ErrNotSupported.
//
// A result that the store does not take, though it is asked for half a second and
// more, is sent to the client all the same, and the key stays taken until its
// lease ends.
//
// # When the store is down
//
// By route, as MiddlewareConfig.StoreDown says: 503 ([FailClosed]), another
// store ([FallBack]; see Runner.Fallback of idempotencypgx), or without
// protection ([FailOpen]), which the header Idempotency-Bypassed and the metrics
// tell.
//
// # Parts of the work
//
// A downstream call needs a key of its own. [ChildKey] derives one that is the
// same in every run of the key, so that a run after a crash repeats the call
// with the key of the first one. [Do] keeps domain errors, too, if the store
// knows their codes ([WithErrors]).
//
// # Observation
//
// [Hooks], and the metrics holdfast.idempotency.requests and
// holdfast.idempotency.duration by [Result], and holdfast.idempotency.active. Keys
// are logged as hashes. A fault that repeats is logged every 10 s, with how many
// lines were skipped.
//
// # Limits
//
// A store beside the business database cannot survive every crash: if the
// process dies after the business transaction committed and before the record
// is stored, or if the store forgets, the key runs again. The Runner of
// idempotencypgx closes this gap by storing the record in the business
// transaction itself; the store here is then only the gate before it.
//
// Bodies are read into memory up to their limit before the handler runs, and a kept
// response stays there until it is sent. How slowly a client may send the one and
// read the other is for http.Server's ReadTimeout and WriteTimeout to say.
package idempotency
