// Package expirypgx expires rows of a Postgres table of yours. It is an
// expiry.Store: give it to expiry.NewSweeper.
//
//	store, err := expirypgx.NewStore(manager, pool, expirypgx.Config{
//		Table:   "reservations",
//		Columns: []string{"event_id"},
//		Emit:    expirypgx.Messages(writer.Write, reservationExpired),
//	})
//
// where reservationExpired makes a message of an expiry.Row, its id from
// expiry.EventID, and writer is that of an outbox.
//
// The table needs a primary key, a deadline of type timestamptz and a status;
// [Config] names them. One batch is one transaction of two statements, and of
// what [Config].Emit or Each adds:
//
//	SELECT … WHERE status = 'held' AND expires_at <= now() AND (expires_at, id) > (…)
//	ORDER BY expires_at, id LIMIT 200 FOR UPDATE SKIP LOCKED;
//	UPDATE … SET status = 'expired'
//	WHERE id = ANY(…) AND status = 'held' AND expires_at <= now();
//
// The conditions stand in both: the second statement alone then never touches
// a row that is not due, whatever the first one locked. Two statements keep the
// order, and are no slower than one UPDATE … RETURNING over a sub-select. Each
// batch starts behind the last one, and so does not read again the index entries
// of rows that have just expired.
//
// Only the database's clock decides. The transaction is READ COMMITTED unless
// Config says otherwise: under SERIALIZABLE the rows that SKIP LOCKED passes over
// still conflict, and several sweepers abort each other.
//
// A look for the next due time is one query. The pool tests a connection that has
// been idle for a second by an empty one, which comes on top.
//
// It wants the index that [Store.Check] asks for, and the sweeper does not start
// without it:
//
//	CREATE INDEX ON holds (expires_at, id) WHERE status = 'held';
//
// Expired rows leave dead entries at its head until they are vacuumed; a table
// that expires many rows wants a low autovacuum_vacuum_scale_factor.
//
// # Rows at fault
//
// A row that cannot be changed, or for which Emit fails, is found and set aside
// by the sweeper, as is one that a constraint or a trigger refuses or keeps from
// changing, or that takes too long. An expiry.RowError, and Each, name it at once. A
// single row that is left and fails by a lost connection, a full disk, a lock that
// somebody holds, a conflict or an error of the schema is not blamed: it is passed
// by, and tried again after pauses that grow up to expiry.SweeperConfig.MaxBackoff.
//
// # Wake-up
//
// In one process [txretry.AfterCommit] and Sweeper.Wake tell the sweeper of new
// rows. Between processes a [Notifier] beside the writer and a [Listener] beside
// the sweeper do:
//
//	txretry.AfterCommit(tx, func() { notifier.Notify(deadline) })
//
//	listener, err := expirypgx.NewListener(pool, sweeper.Wake, expirypgx.ListenerConfig{Table: "holds"})
//	go listener.Run(ctx)
//
// The business commit carries no NOTIFY, which would make Postgres serialise such
// commits: the notifier sends its own afterwards, at most one per 50 ms.
package expirypgx
