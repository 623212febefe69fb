// Package txretrysql runs txretry's transactions on a *sql.DB, so that users of GORM, bun, ent, sqlc
// and plain database/sql get the guarantees of the other packages. It works with any Postgres driver;
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
// The Manager is txretry's own, with the same retries, savepoints, AfterCommit and outcomes. Handlers of an
// inboxpgx.Store and the work of an idempotencypgx.Store on it also run in a transaction of db, together with
// the entry or the record. Statements on tx go through database/sql. [Tx] returns the *sql.Tx
// itself, for code that needs one. Never end that *sql.Tx: return nil or an error from fn.
//
// [Wrap] converts a transaction outside a Manager, such as one of gorm.DB.Transaction, to a pgx.Tx for
// outboxpgx's Write and WriteOnce. Its commit wakes no relay: call Store.Wake after it.
//
// # Costs
//
// The settings of a transaction cost a separate round trip after BEGIN. A statement of AtBegin costs another, its
// look another, and so does each statement of AtCommit (a message, an entry, a record), before COMMIT. On a pgxpool,
// all of them are sent with BEGIN and COMMIT. lib/pq takes two round trips for each statement with arguments, unless
// its binary_parameters=yes is set.
//
//	                                     pgx   stdlib   lib/pq
//	an empty transaction                   2        3        3
//	with a message for the outbox          2        4        5
//	with an inbox entry                    2        4        5
//	with an idempotency record             2        6        9
//
// After a call of [Tx], nothing is deferred to COMMIT, because Do does not see the statements on it. A message is
// sent immediately, which costs the same. Each function of txretry.AfterCommit costs a round trip, and one more
// before COMMIT. A savepoint of GORM, bun or ent therefore undoes the registrations made in it.
//
// pgx's stdlib also pings a connection that was idle for a second.
//
// # Differences
//
//   - Statements on [Tx] itself have the time limits of their contexts and of the server (lock_timeout is set), not
//     those of txretry. For a silent server, a statement ends only if the driver respects its context: pgx's does,
//     lib/pq needs a tcp_user_timeout.
//   - If fn hides an error that came from Tx, Do does not see it and does not retry: it returns
//     pgx.ErrTxCommitRollback. Return errors, wrapped by %w.
//   - fn must close the rows of its queries before it writes a message or registers a function, and before it
//     returns.
//   - A COMMIT without a reply has an unknown outcome, as on a pool. Config.XactStatus costs a round trip.
//   - CopyFrom, Prepare and LargeObjects of the handle return [errors.ErrUnsupported]. Arguments are those of
//     database/sql, and slices of types that pgx knows by itself.
package txretrysql
