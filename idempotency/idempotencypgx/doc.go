// Package idempotencypgx stores the answer of a request in its business transaction.
//
// A store beside the business database can be wrong about it: the process may
// die between COMMIT and the writing of the record, or the store may forget.
// [Store] stores the response by one INSERT in the business transaction itself.
// Effect and answer are then there together or not at all, and a second effect for
// the key cannot commit, since the key is the table's primary key.
//
//	once, err := idempotencypgx.New(manager, idempotencypgx.Config{})
//	protect, err := idempotency.NewMiddleware(once, caller, idempotency.MiddlewareConfig{})
//	mux.Handle("POST /orders", protect(once.Handler(place)))
//
// # Three ways to keep requests apart
//
// The zero Config: Postgres alone. A new key costs no further round trip: a SELECT and an
// advisory lock travel with BEGIN, an INSERT with COMMIT. A request whose key is in a
// transaction gets 409. One whose key has a record is rolled back and gets it; while
// replays follow each other, each is one SELECT. Only the work in Do is protected: of two
// requests whose handlers do something else, both run.
//
// That holds for DoKey, and for Handler right behind the middleware. A handler of your
// own that calls Do may answer without it, so the middleware sends a SELECT before it.
//
// Config.Gate: a store in front, such as Redis. It keeps whole handlers apart and replays
// without Postgres. While it cannot be asked, the records decide: a key that has one is
// answered from it; of several requests at once one commits, and all get its answer.
//
// Config.Lease: claims are rows of the table under a lease, which protects whole
// handlers without Redis, for two statements more, and a third right after a replay. The
// database's clock decides.
//
// # What happens when
//
//   - The process dies before COMMIT: nothing happened. The claim ends, and the same
//     key runs again.
//   - It dies after COMMIT, or the gate is lost: the same key runs again, its
//     transaction breaks on the record (or on a business rule that the first
//     effect changed), is rolled back, and the stored response is the answer.
//     That is why Do believes a failure only after a look for the record.
//   - The outcome of COMMIT is unknown: an INSERT of the same key waits for the
//     lost transaction, where a SELECT would pass over it, and is rolled back.
//     If the record is there, it is the answer; else [ErrNotCommitted].
//   - Two runs are in their transactions at once because the gate lost one: one
//     commits, the other is rolled back and answers with the first one's record.
//   - A record commits after the look for it and before the lock: the same.
//   - A transaction is tried again (40001): each attempt looks and claims anew.
//   - Two keys have the same lock, one pair of 2^64: one gets 409 while the other runs.
//   - A response that is not kept (503, 429 …) rolls its transaction back.
//   - A trigger or a policy drops the record: the transaction is rolled back with [ErrIgnored].
//   - The gate takes the key away from a run (its lease ran out): the run commits
//     nothing any more.
//   - A connection falls silent after BEGIN, and nothing is in front: until the server
//     has ended the lost transaction, the key is in use, and requests get 409.
//
// Records are deleted once their Retention is over: a process that stores one starts a
// pass of 5 s at most, if its last one is a PruneInterval ago.
//
// # Silence
//
// No statement of the store's own waits longer than 6 s, or its context. One that is not
// answered within 2 s is sent again, up to three times, on another connection, for all of
// them may run again; the idle connections are tested meanwhile. When five tries in a row
// have failed, claims in rows leave the server alone but for one try a second. After an
// unknown COMMIT the search for the record waits 10 s; one whose process has vanished holds the key for
// 5 s more at most. What travels with BEGIN or COMMIT has
// the bounds of txretry.
//
// The look that travels with BEGIN runs ahead of the transaction, and so ahead of its lock
// timeout, which could not bound its preparation on a new connection either. While somebody
// holds the table under ACCESS EXCLUSIVE (VACUUM FULL, CLUSTER, most forms of ALTER TABLE) a
// request waits for up to 20 s and gets 503. The deadline of its context ends that sooner, and
// so does a lock_timeout of the role: with one of 1 s it is LOCK_TIMEOUT after six attempts.
//
// # Limits
//
// Work outside the transaction, such as a call to a payment provider, is not
// undone with it and needs an idempotency key of its own (idempotency.ChildKey).
// The table must be in the same database as the business data.
//
// With Lease a Store renews leases while handlers run, over one connection beside the pool: handlers may
// hold every connection of the pool. It is opened for the first renewal, and closed after 15 s without one, also where the pool
// is closed before.
package idempotencypgx
