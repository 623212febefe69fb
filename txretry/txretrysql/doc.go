// Package txretrysql runs txretry's transactions on a *sql.DB, so that users of GORM, bun, ent, sqlc
// and plain database/sql get the promises of the other packages. The driver may be any for Postgres;
// pgx's stdlib and lib/pq are tested.
//
//	manager, err := txretrysql.New(db, pool, txretry.Config{})
//	err = manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
//		if err := queries.WithTx(txretrysql.Tx(tx)).AddOrder(ctx, order); err != nil { // sqlc
//			return err
//		}
//		return store.Write(ctx, tx, message) // *outboxpgx.Store
//	})
//
// The Manager is txretry's own: the same loop, savepoints, AfterCommit and outcomes. Handlers of an
// inboxpgx.Store and the work of an idempotencypgx.Store on it run in a transaction of db as well, with
// the entry or the record in it. What tx is given goes through database/sql; [Tx] is the *sql.Tx
// itself, for the code that needs one. Never end that one: return nil or an error from fn.
//
// A transaction that is not a Manager's, such as that of gorm.DB.Transaction, becomes a pgx.Tx for
// outboxpgx's Write and WriteOnce by [Wrap]. Nobody hears of its commit: call Store.Wake after it.
//
// # What it costs
//
// The settings of a transaction are a round trip of their own behind BEGIN, a statement of AtBegin is
// one, its look another, and so is each of AtCommit (a message, an entry, a record), before COMMIT. On a pgxpool all of
// them travel with BEGIN and COMMIT. lib/pq takes two round trips for each statement with arguments,
// unless its binary_parameters=yes is set.
//
//	                                     pgx   stdlib   lib/pq
//	an empty transaction                   2        3        3
//	with a message for the outbox          2        4        5
//	with an inbox entry                    2        4        5
//	with an idempotency record             2        6        9
//
// Where [Tx] is used nothing waits for COMMIT, because Do does not see the statements on it: a message is sent
// at once, which costs the same, and each function of txretry.AfterCommit costs a round trip, and one more
// before COMMIT. So a savepoint of GORM, bun or ent takes back what was registered in it.
//
// pgx's stdlib also pings a connection that was idle for a second.
//
// # What is different
//
//   - Statements that run on [Tx] itself are bounded by their contexts and the server's timeouts
//     (lock_timeout is set), not by txretry. A server that is silent is given up at a statement
//     only if the driver ends with its context: pgx's does, lib/pq needs a tcp_user_timeout.
//   - An error that fn hides is not seen where it came from Tx, so it is not retried: Do then returns
//     pgx.ErrTxCommitRollback. Return errors, wrapped by %w.
//   - fn closes the rows of its queries before it writes a message or registers a function, and before it returns.
//   - A COMMIT without an answer has an unknown outcome, as ever. Config.XactStatus costs a round trip.
//   - CopyFrom, Prepare and LargeObjects of the handle are refused with [errors.ErrUnsupported].
//     Arguments are those of database/sql, and slices of what pgx knows by itself.
package txretrysql
