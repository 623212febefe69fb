// Package expirypgx expires rows of a Postgres table of yours. It is an
// expiry.Store: give it to expiry.NewSweeper.
//
//	store, err := expirypgx.NewStore(manager, pool, expirypgx.Config{
//		Table:   "reservations",
//		Columns: []string{"event_id"},
//		Emit: func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error {
//			messages, err := expiredMessages(rows) // their ids from expiry.EventID
//			if err != nil {
//				return err
//			}
//			return writer.Write(ctx, tx, messages...)
//		},
//	})
//
// The table needs a primary key, a deadline of type timestamptz and a status;
// [Config] names them. One batch is one transaction of two statements, and of
// what [Config].Emit adds:
//
//	SELECT … WHERE status = 'held' AND expires_at <= now()
//	ORDER BY expires_at, id LIMIT 200 FOR UPDATE SKIP LOCKED;
//	UPDATE … SET status = 'expired'
//	WHERE id = ANY(…) AND status = 'held' AND expires_at <= now();
//
// The conditions stand in both: the second statement alone then never touches
// a row that is not due, whatever the first one locked.
//
// Only the database's clock decides. The transaction is READ COMMITTED unless
// Config says otherwise: under SERIALIZABLE the rows that SKIP LOCKED passes over
// still conflict, and several sweepers abort each other.
//
// It wants the index that [Store.Check] asks for:
//
//	CREATE INDEX ON holds (expires_at, id) WHERE status = 'held';
//
// A row that cannot be changed, or for which Emit fails, is found and set aside
// by the sweeper, as is one that a constraint or a trigger refuses or keeps from
// changing. Lost
// connections, lock timeouts and errors of the schema stop the sweep instead and
// are tried again later.
package expirypgx
