// Package expirypgx expires rows of a Postgres table of yours. Its [Store] is what
// expiry.NewSweeper takes; the code that makes such rows announces them to it.
//
//	holds, err := expirypgx.New(manager, "holds", expirypgx.Config{
//		Columns: []string{"seat"},
//		Emit:    expirypgx.Messages(messages.Write, holdExpired),
//	})
//	sweeper, err := expiry.NewSweeper(holds, expiry.SweeperConfig{})
//	err = sweeper.Run(ctx)
//
// Here messages is the store of an outbox, and holdExpired makes a message of an
// expiry.Row, its id from expiry.EventID. Where a row is made or changed:
//
//	err := manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
//		holds.Due(tx, deadline)
//		_, err := tx.Exec(ctx, "INSERT INTO holds …")
//		return err
//	})
//
// # The table
//
// The table is yours; nothing here creates or changes it. It needs a primary key, a
// deadline of type timestamptz and a status; [Config] names them. It also needs the
// index that [Store.Check] asks for. A sweeper does not start without it:
//
//	CREATE INDEX ON holds (expires_at, id) WHERE status = 'held';
//
// Expired rows leave dead entries at the head of the index until they are vacuumed;
// a table that expires many rows wants a low autovacuum_vacuum_scale_factor.
//
// # A batch
//
// One batch is one transaction of three statements in two trips, and of what [Config].Emit adds:
//
//	SELECT … WHERE status = 'held' AND expires_at <= now() AND (expires_at, id) > (…)
//	ORDER BY expires_at, id LIMIT 200 FOR UPDATE SKIP LOCKED;
//	UPDATE … SET status = 'expired'
//	WHERE id = ANY(…) AND status = 'held' AND expires_at <= now() RETURNING …;
//	SELECT count(*) … WHERE id = ANY(…) AND status = 'held' AND expires_at <= now();
//
// The conditions stand in all: the second statement alone then never touches
// a row that is not due, whatever the first one locked. Two statements keep the
// order. The third finds rows that a trigger has made due again. A batch whose rows do
// not all change, once each, fails with [ErrIgnored]. Each batch starts behind the last one, so it does not read again the index
// entries of rows that have just expired.
//
// Only the database's clock decides. The transaction is READ COMMITTED unless
// Config says otherwise: under SERIALIZABLE the rows that SKIP LOCKED passes over
// still conflict, and several sweepers abort each other.
//
// A look for the next due time is one query. The pool tests a connection that has
// been idle for a second by an empty one, which comes on top.
//
// # Rows at fault
//
// A row is at fault if a constraint or a trigger refuses it or keeps it from
// changing, if Emit fails for it, or if it takes too long. The sweeper finds it and
// sets it aside; an expiry.RowError names it at once. A single row that is left and
// fails by a lost connection, a full disk, a lock that somebody holds, a conflict or
// an error of the schema is not blamed: it is passed by, and tried again after pauses
// that grow up to 5 s.
//
// # Wake-ups
//
// [Store.Due] tells the sweepers of this process at once, and those of other
// processes by a NOTIFY of its own. It has a goroutine only while it sends. A running
// sweeper listens on a connection that the Store takes out of the pool, and tests
// that connection every 3 s. Behind a pooler in transaction mode LISTEN is swallowed:
// Check says so, and Config.PollOnly turns both off.
package expirypgx
