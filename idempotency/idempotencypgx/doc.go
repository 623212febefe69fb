// Package idempotencypgx keeps idempotency records in Postgres, in two ways.
//
// # Store: Postgres alone
//
// [Store] is an driver.Store for services that have no Redis: claims and
// records in one table. Beginning a new key costs a SELECT and an INSERT, a
// replay one SELECT and no write. Leases are decided by the database's clock.
//
// # Runner: the record in the business transaction
//
// A store beside the business database can be wrong about it: the process may
// die between COMMIT and the writing of the record, or the store may forget.
// [Runner] stores the response by one INSERT in the business transaction
// itself. The effect and its answer are then there together or not at all, and
// a second effect for the key cannot commit, since the key is the table's
// primary key. The store in front, the gate, only keeps concurrent requests
// apart and replays fast.
//
//	func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
//		_, err := h.runner.Run(r.Context(), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
//			order, err := place(ctx, tx)
//			if err != nil {
//				return idempotency.Response{}, err
//			}
//			return idempotency.JSON(http.StatusCreated, order)
//		})
//		if err != nil {
//			…
//		}
//		// The middleware sends the stored response.
//	}
//
// # What happens when
//
//   - The process dies before COMMIT: nothing happened. The lease runs out, and
//     the same key runs again.
//   - It dies after COMMIT, or the gate is lost: the same key runs again, its
//     transaction breaks on the record (or on a business rule that the first
//     effect changed), is rolled back, and the stored response is the answer.
//     That is why a failure is believed only after a look for the record.
//   - The outcome of COMMIT is unknown: an INSERT of the same key waits for the
//     lost transaction, where a SELECT would pass over it, and is rolled back.
//     If the record is there, it is the answer; else [ErrNotCommitted].
//   - Two runs are in their transactions at once because the gate lost one: one
//     commits, the other is rolled back and answers with the first one's record.
//   - A response that Keep releases (503, 429 …) rolls its transaction back.
//   - The gate is down: with [Runner.Fallback] as the middleware's Fallback the
//     records decide. A key that has one is answered from it; of several requests
//     at once one commits, and all get its answer. RunKey does so by itself.
//   - The gate takes the key away from a run (its lease ran out): the run commits
//     nothing any more.
//
// Records are kept until [Prune] deletes those older than the retention.
//
// # Silence
//
// No statement waits longer than 6 s, or its context. One that is not answered within
// 2 s is sent again, up to three times, on another connection, for all of them may
// run again; the idle connections are tested meanwhile. When five tries in a row have
// failed, Store.Begin leaves the server alone but for one try a second. Resolve waits
// for another transaction as long as its context lets it.
//
// # Limits
//
// Work outside the transaction, such as a call to a payment provider, is not
// undone with it and needs an idempotency key of its own (idempotency.ChildKey).
// An answer given without Run is in the gate only. The records must be
// in the same database as the business data, and not in the table of a Store.
//
// A Store renews leases while handlers run. Give it a pool of its own where
// handlers may hold every connection of theirs for as long as a lease.
package idempotencypgx
