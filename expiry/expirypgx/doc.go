// Package expirypgx expires rows of your Postgres table. Pass its [Store] to expiry.NewSweeper.
// Code that makes such rows announces them to the Store.
//
//	holds, err := expirypgx.New(manager, "holds", expirypgx.Config{
//		Columns: []string{"seat"},
//		Emit:    expirypgx.Messages(messages.Write, holdExpired),
//	})
//	sweeper, err := expiry.NewSweeper(holds, expiry.SweeperConfig{})
//	err = sweeper.Run(ctx)
//
// Here messages is the store of an outbox, and holdExpired makes a message from an expiry.Row, with
// an id from expiry.EventID. Code that makes or changes a row:
//
//	err := manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
//		holds.Due(tx, deadline)
//		_, err := tx.Exec(ctx, "INSERT INTO holds …")
//		return err
//	})
//
// # The table
//
// The table is yours; this package does not create or change it. It needs a primary key, a deadline
// of type timestamptz and a status; [Config] names them. It also needs the index that [Store.Check]
// suggests. A sweeper does not start without it:
//
//	CREATE INDEX ON holds (expires_at, id) WHERE status = 'held';
//
// Expired rows leave dead entries at the head of the index until a vacuum. A table that expires
// many rows needs a low autovacuum_vacuum_scale_factor.
//
// # A batch
//
// A batch is one transaction of three statements in two round trips, plus the work of
// [Config].Emit:
//
//	SELECT … WHERE status = 'held' AND expires_at <= now() AND (expires_at, id) > (…)
//	ORDER BY expires_at, id LIMIT 200 FOR UPDATE SKIP LOCKED;
//	UPDATE … SET status = 'expired'
//	WHERE id = ANY(…) AND status = 'held' AND expires_at <= now() RETURNING …;
//	SELECT count(*) … WHERE id = ANY(…) AND status = 'held' AND expires_at <= now();
//
// The conditions are in all statements, so the second statement never touches a row that is not
// due, whatever the first one locked. Two statements keep the order. The third statement finds rows
// that a trigger has made due again. If the rows of a batch do not all change, once each, the batch
// fails with [ErrIgnored]. Each batch starts behind the previous one, so it does not read the index
// entries of just expired rows again.
//
// Only the database's clock decides. The transaction is READ COMMITTED unless Config sets another
// level. Under SERIALIZABLE the rows that SKIP LOCKED skips still conflict, and concurrent sweepers
// abort each other.
//
// Look is one query. If its connection was idle for a second, the pool first tests it with an empty
// query.
//
// # Failing rows
//
// A row is at fault if a constraint or a trigger rejects it or keeps it from changing, if Emit
// fails for it, or if it takes too long. The sweeper finds it and sets it aside; an expiry.RowError
// names it at once. A single remaining row may fail by a lost connection, a full disk, a lock of
// another transaction, a conflict or a schema error. Then it does not go to quarantine: it is
// skipped, and tried again after growing pauses of up to 5 s.
//
// # Wake-ups
//
// [Store.Due] wakes the sweepers of this process at once. It wakes the sweepers of other processes
// by a separate NOTIFY; it runs a goroutine only while it sends. A running sweeper listens on a
// connection that the Store takes out of the pool, and tests that connection every 3 s. A pooler in
// transaction mode swallows LISTEN: Check reports this, and Config.PollOnly turns both off.
package expirypgx
