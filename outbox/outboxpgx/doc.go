// Package outboxpgx stores the outbox in Postgres.
//
//	store, err := outboxpgx.New(pool, outboxpgx.Config{})
//	err = store.Migrate(ctx)
//	err = store.Write(ctx, tx, m) // in the business transaction
//	relay, err := outbox.NewRelay(store, publisher, outbox.RelayConfig{})
//
// A [Store] writes messages, serves relays, creates its tables, checks its server, prunes, and
// lists and replays dead letters.
//
// # How it works
//
// The key of a message selects one of 16 lanes. A claim leases lanes that have ready messages. It locks
// rows of the lanes table with SKIP LOCKED, sets a new fencing token, and only reads the messages.
// Settling checks the tokens, deletes the published messages in one statement and releases the lanes. A
// message costs one insert and one delete. A relay needs two round trips for a single message. A claim
// does not wait for the disk: its token is random, so a claim lost in a crash has no effect.
//
// claim.go describes a claim, horizon.go the floors below which no row is ready, waiting.go the states of
// waiting messages.
//
// An old snapshot keeps old versions of rows. The throughput stays the same, but a message costs Postgres up to
// three times as much. (go run ./internal/lab/soak -part snapshot)
//
// # Retention
//
// With Config.Retention, published messages stay in the table, outside the indexes that a claim reads.
// Marking costs more than deleting: the throughput falls to 70 %.
// (go test -run - -bench Retention ./outbox/outboxpgx)
//
// A relay prunes every minute: published messages, keys of WriteOnce and the audit. See
// Config.PruneInterval and Store.Prune. Dead letters are never pruned.
//
// # Wake-up
//
// A relay polls once per second, and every 5 s while it receives notifications. After a commit with txretry, the
// Store wakes a relay of its process. If there is none, it notifies other processes with a separate statement, at
// most once per 2 ms: a NOTIFY in the business transaction would serialise commits. A relay listens on a
// connection outside the pool, and tests it. If a pooler drops notifications, the log and Store.Check
// report it, and relays poll. Config.PollOnly turns off sending and listening.
//
// After the commit of a raw pgx.Tx or of txretrysql.Wrap, call Store.Wake.
//
// # Other languages
//
// Migrate creates the function holdfast_outbox_write, named after the table, with the same checks.
// Relays find its messages when they poll. examples/guides/wire.md lists its arguments.
//
// # Silent connections
//
// Every call has a time limit, at most 5 s for a relay. After a timeout the next call uses another connection, and
// idle connections are tested. txretry.PreparePool shortens the outage when all connections are lost.
//
// # Limits
//
// All times come from the database. Relay transactions run at READ COMMITTED. Messages of a key are ordered
// by when they were stored: order their transactions with a lock on something that belongs to the key. A killed
// relay holds its lanes for 6 s by default. Very many messages of a paused transport slow the claims of
// their lanes. Very many messages behind a waiting one of their key delay the lane once, for some seconds
// per 100,000.
//
// After TRUNCATE … RESTART IDENTITY, or a setval to a lower number, running relays find new messages within 5 s,
// and may publish later messages of their keys first. Stop all relays before, and start them afterwards: a relay
// that starts keeps the order. TRUNCATE without RESTART IDENTITY needs neither.
//
// If another session has locked a message's row, the message waits until that session ends, with its key or its
// lane. If the row was locked during publishing, the message is published again, with the later messages of its
// key. If a trigger or constraint prevents deleting a message, it is marked as published.
//
// If a trigger, rule or row-level security drops a change without an error, the call returns [ErrIgnored]
// and changes nothing; Check names the cause. A dropped outcome does not block the others of its batch. The relay
// does not publish that message again and records the outcome later. Until then, Ready returns the reason. The relay
// keeps this in memory only, so another process publishes the message once more.
package outboxpgx
