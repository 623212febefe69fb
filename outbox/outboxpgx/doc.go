// Package outboxpgx keeps the outbox in Postgres.
//
// A [Store] writes messages in the caller's transaction and gives them to relays. It creates its
// tables, checks its server, prunes, and shows and replays what was given up.
//
// # How it works
//
// A message lies in one of 16 lanes, chosen by its ordering key. A claim leases
// a few lanes that have something to publish: one row of the table of lanes is
// locked with SKIP LOCKED and gets a new fencing token and an end of the
// lease; the messages themselves are only read. Settling checks the tokens,
// deletes the published messages with one statement (or marks them, with
// Retention) and releases the lanes. So a message costs one insert and one
// delete, relays share the work without knowing of each other, and one that
// wakes up after its lease ran out changes nothing.
//
// A claim takes one round trip and does not wait for the disk. Its token is a
// random number, so that a claim that a crash of the database undid is fenced off
// like any other; a settlement is as durable as every commit. It takes one round trip,
// too, and looks in the same one, after its commit, at what has come to its lanes
// meanwhile. So a message that comes alone costs two round trips and four
// statements: claim, read, settle, look. Three of them are functions that Migrate
// makes, since the settings that keep the plans from following the statistics would be
// a statement of each transaction otherwise.
//
// Lanes are leased for a batch and not kept. A relay that kept them would spare the two
// updates of the lanes; but the commits of a process wake the relay of that process, which
// would have to find and wake the keeper, and a relay that is idle would have to
// renew.
//
// A message that waits for its time or its next attempt leaves the index of ready
// rows. So do the messages behind it in its key, once a claim has met them. When it
// is due they come back in portions, as fast as a key can be published. Meanwhile
// claims walk over none of them, however many there are.
//
// Each lane has a floor: the sequence number below which nothing is ready. It spares
// claims the index entries of rows long gone, which Postgres must keep while any
// session holds an old snapshot. A floor rises only past numbers whose transactions
// have all ended, so a transaction that commits late is found at once and in its
// place. It is lowered to a message that comes back from its wait. What a relay knows of
// the numbers is void on another start of the server, which may have lost some. Every 5 s a claim
// looks below the floors for 250 ms at most. So a floor that is wrong, as after a
// restore of one table without the other, delays messages and loses none.
// On another start of the server the first claim that finds anything looks as well, before it gives anything out: numbers
// that a switch has set back are published in their order. Set back under a running server, some may reach the
// floors before the look, and are published before lower ones of their key.
//
// The old versions of the lanes' rows stay under an old snapshot, too, and each claim reads them all. The
// longer a claim takes, the more messages wait for the next one: claims become fewer and larger, so the rate
// stays, while a message costs Postgres up to three times as much. (go run ./internal/lab/soak -part snapshot)
//
// # Retention
//
// With Config.Retention published messages stay in the table until they are pruned. They are in none
// of the indexes that a claim reads: beside a million of them a relay claims and settles at about 90 %
// of its rate without. Marking itself is an update and costs more than a delete: it has 70 % of the
// rate, with a publisher that confirms at once. (go test -run - -bench Retention ./outbox/outboxpgx)
//
// A relay prunes every minute: published messages, the keys of WriteOnce and the audit, each when it is
// old enough. See Config.PruneInterval and Store.Prune. Dead letters are never pruned.
//
// # Wake-up
//
// A relay polls once per second, and every 5 s while it hears of commits. Nothing has to be wired for that. After a
// commit of txretry the Store asks the relays that run on it, in turn, until one will look. If none
// will, it notifies those of other processes, with a statement of its own: a NOTIFY in the business
// transaction would make Postgres serialise such commits. There is at most one notification per 2 ms,
// and no goroutine once the last is sent. A relay that runs on a Store listens, on a connection beside
// the pool's maximum, and tests that with notifications to itself. When a pooler swallows them, the log
// and Store.Check say so, and relays find messages when they poll. Config.PollOnly turns off both
// telling and listening.
//
// Nothing is heard of the commit of a raw pgx.Tx or of txretrysql.Wrap: call Store.Wake after it.
//
// # Other languages
//
// Migrate makes a function holdfast_outbox_write, called after the table, by which programs in any
// language write messages with the same checks, in a transaction of theirs. Relays find those when they
// poll. examples/guides/wire.md has its arguments.
//
// # Silent connections
//
// No call waits for ever for a server that is silent: those of a relay have 5 s at most, the others
// bounds of their own, and the next one gets another connection. The idle connections of the pool are
// looked at then, so that each silent one costs no wait of its own. A pool that txretry.PreparePool has
// prepared gets over the loss of all its connections sooner.
//
// # Limits
//
// All times are the database's. Relay transactions are short and run at READ
// COMMITTED. Messages of one key are ordered as they were stored, which is the
// order of their transactions only where those are ordered by a lock or an
// update on something that belongs to the key. A relay that is killed holds its
// lanes until the lease runs out, 6 s by default. Very many messages of a paused transport slow
// the claims of their lanes, since they are looked at and left. Very many that
// come to lie behind a waiting one of their key at once are put aside 1,000 at a
// time, which holds up the lane for some seconds per 100,000, once.
//
// A message whose row another session has locked is left alone until that session ends: one that waits with its key, and
// one that is ready with its lane. Locked while it was published, it is published again then, with the later ones of its
// key. One that a trigger or a constraint of yours keeps from being deleted is marked as published, as with Retention.
//
// A trigger, a rule or row-level security of yours on these tables may drop a change without an error. A call that finds this
// out returns [ErrIgnored] and changes nothing; Check names the cause. An outcome that the table ignores, or refuses for one
// message, does not keep the others of its batch. A relay does not publish that message again: it records the outcome
// later, and Ready returns the reason until then. It keeps this in memory, so another process publishes the message once more.
package outboxpgx
