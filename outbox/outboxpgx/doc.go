// Package outboxpgx stores the outbox in Postgres.
//
//	store, err := outboxpgx.New(pool, outboxpgx.Config{})
//	err = store.Migrate(ctx)
//	err = store.Write(ctx, tx, m) // in the business transaction
//	relay, err := outbox.NewRelay(store, publisher, outbox.RelayConfig{})
//
// A [Store] writes messages, gives them to relays, creates its tables, checks its server, prunes, and
// lists and replays dead letters.
//
// # How it works
//
// The key of a message chooses one of 16 lanes. A claim leases lanes that have ready messages: it locks
// rows of the table of lanes with SKIP LOCKED, sets a new fencing token, and only reads the messages.
// Settling checks the tokens, deletes the published messages in one statement and frees the lanes. A
// message costs one insert and one delete; one that comes alone costs a relay two round trips. A claim does
// not wait for the disk: its token is random, so a claim that was lost in a crash is fenced off.
//
// claim.go draws a claim, horizon.go the floors below which nothing is ready, waiting.go the states of
// messages that wait.
//
// An old snapshot keeps the old versions of rows. The rate stays, while a message costs Postgres up to
// three times as much. (go run ./internal/lab/soak -part snapshot)
//
// # Retention
//
// With Config.Retention published messages stay in the table, outside the indexes that a claim reads.
// Marking costs more than deleting: it has 70 % of the rate.
// (go test -run - -bench Retention ./outbox/outboxpgx)
//
// A relay prunes every minute: published messages, keys of WriteOnce and the audit. See
// Config.PruneInterval and Store.Prune. Dead letters are never pruned.
//
// # Wake-up
//
// A relay polls once per second, and every 5 s while notifications reach it. After a commit of txretry the Store wakes
// a relay of its process. If there is none, it notifies other processes with a statement of its own, at
// most once per 2 ms: a NOTIFY in the business transaction would serialise commits. A relay listens on a
// connection beside the pool, and tests it. When a pooler drops notifications, the log and Store.Check
// report it, and relays poll. Config.PollOnly turns off both sides.
//
// After the commit of a raw pgx.Tx or of txretrysql.Wrap call Store.Wake.
//
// # Other languages
//
// Migrate creates the function holdfast_outbox_write, named after the table, with the same checks.
// Relays find its messages when they poll. examples/guides/wire.md lists its arguments.
//
// # Silent connections
//
// Every call has a bound, 5 s at most for a relay, and the next call uses another connection. Idle
// connections are tested then. txretry.PreparePool shortens the loss of all connections.
//
// # Limits
//
// All times are the database's. Relay transactions run at READ COMMITTED. Messages of a key are ordered
// as they were stored: order these transactions by a lock on something that belongs to the key. A killed
// relay holds its lanes for 6 s by default. Very many messages of a paused transport slow the claims of
// their lanes. Very many messages behind a waiting one of their key hold up the lane once, for some seconds
// per 100,000.
//
// A message whose row another session has locked waits until that session ends, with its key or its lane.
// If it was locked while it was published, it is published again, with the later messages of its key. A message that
// a trigger or constraint keeps from being deleted is marked as published.
//
// If a trigger, rule or row-level security drops a change without an error, the call returns [ErrIgnored]
// and changes nothing; Check names the cause. A dropped outcome does not stop the others of its batch. The relay does not
// publish that message again, records the outcome later, and Ready returns the reason until then. It
// keeps this in memory, so another process publishes the message once more.
package outboxpgx
