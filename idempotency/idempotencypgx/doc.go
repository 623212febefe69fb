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
// The zero Config uses Postgres alone. A new key costs no round trip: a SELECT and an advisory lock
// travel with BEGIN, an INSERT with COMMIT. A request whose key is in a transaction gets 409. A request
// whose key has a record is rolled back and gets the record. Only the work in Do is protected, and
// a handler of your own that calls Do costs a SELECT before it.
//
// Config.Gate puts a store in front, such as Redis. It separates whole handlers and replays without
// Postgres. While the gate is down, the records decide: one of several requests commits, and all get its answer.
//
// Config.Lease stores claims as rows under a lease. It protects whole handlers without Redis, for two
// more statements, and a third right after a replay. The database's clock decides.
//
// # What happens if
//
//   - The process dies before COMMIT: nothing happened. The claim ends, and the key runs again.
//   - It dies after COMMIT, or the gate lost the key: the key runs again, its transaction fails on the
//     record or on a business rule, is rolled back, and the stored response is the answer. So Do looks
//     for the record before it returns a failure.
//   - The outcome of COMMIT is unknown: an INSERT of the same key waits for the lost transaction and is
//     rolled back. A record is the answer; without one the error is [ErrNotCommitted].
//   - Two runs of a key are in transactions at once: one commits, the other answers with its record.
//   - A transaction is retried (40001): each attempt looks and claims again.
//   - Two keys share a lock (one pair of 2^64): one gets 409 while the other runs.
//   - A response that is not kept (503, 429 …) rolls its transaction back.
//   - A trigger or a policy drops the record: rolled back with [ErrIgnored].
//   - The lease of the gate ends during a run: the run commits nothing.
//   - A connection stops answering after BEGIN, without a gate: the key is in use (409) until the server ends the
//     transaction.
//
// Records are deleted after their Retention: a process that stores one starts a pass of 5 s at most,
// once per PruneInterval.
//
// # Silence
//
// A statement of the store waits 6 s at most. After 2 s without an answer it is sent again on
// another connection, up to three times. After five failures in a row, claims in rows try the server once a second.
// After an unknown COMMIT the search for the record takes 10 s at most. The bounds of txretry hold for
// BEGIN and COMMIT.
//
// While another session holds the table under ACCESS EXCLUSIVE (VACUUM FULL, most forms of ALTER TABLE)
// a request waits up to 20 s and gets 503. A deadline of its context, or a lock_timeout of the role, ends that sooner.
//
// # Limits
//
// Work outside the transaction is not undone with it and needs a key of its own (idempotency.ChildKey).
// The table must be in the database of the business data. With Lease a Store opens one connection beside the pool
// for renewals, and closes it after 15 s without one.
package idempotencypgx
