// Package idempotencypgx stores the answer of a request in its business transaction.
//
//	once, err := idempotencypgx.New(manager, idempotencypgx.Config{})
//	protect, err := idempotency.NewMiddleware(once, caller, idempotency.MiddlewareConfig{})
//	mux.Handle("POST /orders", protect(once.Handler(place)))
//
// [Store] inserts the response in the business transaction. Effect and answer commit together,
// and a second effect for the key cannot commit, because the key is the primary key.
//
// # Three ways to separate requests
//
// The zero Config uses Postgres alone. A new key costs no extra round trip: a SELECT and an advisory lock travel with
// BEGIN, an INSERT with COMMIT. While a transaction runs with a key, other requests with the key get 409. If a key
// already has a record, the transaction is rolled back and the request gets the record. Only the work in Do is
// protected. A handler of your own that calls Do costs one SELECT more.
//
// Config.Gate puts a store such as Redis in front. It keeps concurrent requests apart before any handler runs, and
// replays without Postgres. While the gate is down, the records decide: one of several requests commits, and all get
// its answer.
//
// Config.Lease stores claims as rows under a lease. It protects whole handlers without Redis. It costs two statements
// more, and a third one right after a replay. All times come from the database's clock.
//
// # Failures
//
//   - The process dies before COMMIT: nothing happened. The claim ends, and the key runs again.
//   - The process dies after COMMIT, or the gate lost the key: the key runs again. Its transaction fails on the
//     record or on a business rule and is rolled back, and the stored response is the answer. Do therefore looks for
//     the record before it returns a failure.
//   - The outcome of COMMIT is unknown: an INSERT of the same key waits for the lost transaction and is rolled back.
//     A record is the answer; without a record the error is [ErrNotCommitted].
//   - Two runs of a key have transactions at the same time: one commits, the other one answers with its record.
//   - A transaction is retried (40001): each attempt looks and claims again.
//   - Two keys share a lock (one pair of 2^64): one gets 409 while the other runs.
//   - A response is not kept (503, 429 …): its transaction is rolled back.
//   - A trigger or a policy drops the record: the transaction is rolled back with [ErrIgnored].
//   - The lease of the gate ends during a run: the run commits nothing.
//   - A connection stops answering after BEGIN, without a gate: the key is in use (409) until the server ends the
//     transaction.
//
// Records are deleted after their Retention. A process that stores a record starts a pass of at most 5 s, once per
// PruneInterval.
//
// # Timeouts
//
// A statement of the store waits at most 6 s. After 2 s without an answer it is sent again on another connection, up
// to three times. After five failures in a row, claims in rows use the server only once a second. After an unknown
// COMMIT the search for the record takes at most 10 s. BEGIN and COMMIT have the limits of txretry.
//
// While another session holds the table under ACCESS EXCLUSIVE (VACUUM FULL, most forms of ALTER TABLE), a request
// waits up to 20 s and gets 503. A deadline of its context, or a lock_timeout of the role, ends the wait sooner.
//
// # Limits
//
// Work outside the transaction is not undone with it and needs its own key (idempotency.ChildKey). The table must be
// in the database of the business data. With Lease a Store opens one connection outside the pool for renewals, and
// closes it 15 s after the last renewal.
package idempotencypgx
