package main

import (
	"slices"
	"strings"
)

// reason tells why goals are missed: what bounds them, and which rows of the report show it.
type reason struct {
	workload string
	of       []string // what the texts of the goals begin with
	why      string
}

func (r reason) speaksOf(g kept) bool {
	return r.workload == g.Workload && slices.ContainsFunc(r.of, func(beginning string) bool { return strings.HasPrefix(g.Text, beginning) })
}

// reasonOf returns the number of the goal's reason, and -1 where none is known.
func reasonOf(g kept) int {
	return slices.IndexFunc(reasons, func(r reason) bool { return r.speaksOf(g) })
}

var reasons = []reason{
	{
		"txretry",
		[]string{"of raw one-trip begin"},
		"Both send the same statements in the same round trips. Ours costs this process a few microseconds more (`client us/tx`): a retry loop, a span and metrics.",
	},
	{
		"txretry",
		[]string{"x plain five trips with INSERT by hand"},
		"One trip of five is saved, so 1.25 is the most. On loopback a trip is a small part of a transaction; with 2 ms more per trip the work of the servers is still one.",
	},
	{
		"txretry",
		[]string{"x crdbpgxv5"},
		"The peer sends a SAVEPOINT and its RELEASE, two round trips more. Where all clients together take both cores, a trip that is saved is worth its processor time alone.",
	},
	{
		"txretry",
		[]string{"x the sequential rate, SerialKey and Combine, 1 row"},
		"Calls that share a transaction share BEGIN and COMMIT. Each still sends a SELECT and an UPDATE of its own, one after the other on one connection. " +
			"The row `one connection, 16 calls a COMMIT` does the same by hand and misses the goal, too.",
	},
	{
		"outbox",
		[]string{"of publish alone, raw client, unkeyed", "of publish alone, raw, the same messages, unkeyed", "x river, 2000 workers, fetch cooldown 1 ms, unkeyed"},
		"A relay also claims, reads and deletes, on the same two cores as the broker and Postgres. " +
			"Where publishing alone has a rate p and `claim and settle alone` a rate c, both have about 1/(1/p + 1/c) if they do not overlap. " +
			"The row `publish alone, raw, the same messages` has the id, the type and the mandatory flag of ours, and costs the broker more than the bare one.",
	},
	{
		"outbox",
		[]string{"of unkeyed, 1,000 keys"},
		"A message with a key has two headers and a second routing key more, which the broker reads, and a claim looks once in an index for a waiting message before it.",
	},
	{
		"outbox",
		[]string{"of unkeyed, 10 keys"},
		"The next message of a key leaves when the one before is confirmed, so ten keys have ten messages under way. " +
			"One that left sooner would overtake one that fails. That is a planted bug, `the next of a key is sent before the confirm`, which the simulation finds.",
	},
	{
		"outbox",
		[]string{"x raw, NOTIFY in the transaction, p50", "x raw, NOTIFY in the transaction, p99"},
		"The raw relay reads without a lease: two of them would publish everything twice. A claim of ours is a transaction that leases lanes. " +
			"A Notifier sends its NOTIFY on another connection after the commit, so that commits of the business do not wait for each other by a NOTIFY's lock. " +
			"That is one more trip, and at least 2 ms lie between two of them.",
	},
	{
		"inbox",
		[]string{"of raw, its dedup entry in one trip with BEGIN", "of raw, a transaction each"},
		"The raw consumers send the same statements, one of them in the same trips. Ours costs this process more (`client us/message`): " +
			"a message passes a receiver, a worker and an acknowledger, with a span, metrics, and checks of what it holds.",
	},
	{
		"inbox",
		[]string{"x one worker, a batch handler, 2 workers"},
		"One worker takes nearly all that the raw batch consumer takes, and that one is bound by what a classic queue gives out. On a Redis stream a second worker does gain.",
	},
	{
		"inbox",
		[]string{"of the raw batch consumer, a batch handler", "x watermill with 32 handlers, a batch handler"},
		"The broker has the largest share of the processors, and what is left goes to each message's own way: the raw consumer decodes no message, makes no span, " +
			"and sends one acknowledgement for a batch without a look at what became of each. Five times the peer would be 0.92 of it.",
	},
	{
		"inbox",
		[]string{"x one worker, a handler per message in batches, 4 workers"},
		"A handler per message has its own statements, one after the other on a batch's connection. Four workers send four such rows of statements, " +
			"and the two cores, which the broker, Postgres and this process share, have little left idle (`holdfast, batches of 200, a handler per message`).",
	},
	{
		"expiry",
		[]string{"of raw pgx, two statements, sweepers: 4"},
		"Ours costs this process one to two microseconds a row more than the raw client (`client us/row`), and four sweepers leave no idle core to pay them with.",
	},
	{
		"idempotency",
		[]string{"us over the bare handler, first run in memory", "allocations over the bare handler, first run in memory"},
		"Every request has its key checked, a fingerprint of its body, a recorder for the answer, a copy of it, a context with a lease, and a record in the store.",
	},
	{
		"idempotency",
		[]string{"of raw redis"},
		"The raw client sends SET. Ours sends a script that compares a token, writes a hash of eight fields and a lock, and has a reply for each state. " +
			"The middleware adds the fingerprint, the recorder and the headers.",
	},
	{
		"idempotency",
		[]string{"of raw postgres, INSERT .. DO NOTHING, then UPDATE"},
		"The raw table has two columns and one index. A record has eleven columns, a lease, a token and a fingerprint among them, and a second index by its end, without which nothing could be pruned.",
	},
	{
		"idempotency",
		[]string{"of raw postgres, SELECT, replay", "of raw postgres, SELECT, no gate, replay"},
		"The raw client reads one column. A replay reads the whole record, decodes the headers and compares the fingerprint; the middleware writes the answer, too.",
	},
	{
		"idempotency",
		[]string{"of transaction alone, no gate, first run", "of the transaction alone, two tiers"},
		"A record is one more row to write, in a table with two indexes, and two tiers add two calls of Redis. " +
			"The contender that keeps its record by hand sends the fewest statements that do, and shows how much of the distance they are.",
	},
	{
		"ratelimit",
		[]string{"of raw EVALSHA by AutoPipeline", "of raw EVALSHA, one counter"},
		"The raw script increments one counter. Ours reads and writes a window of two counters for each limit, by the server's clock. `holdfast, user` has one limit and pays half of it.",
	},
	{
		"ratelimit",
		[]string{"x redis_rate, holdfast"},
		"The peer decides about one limit in each call. Calls of ours share trips, so that Redis has the smaller share of the processors and this process the larger one: " +
			"what bounds `holdfast, user` is what a decision costs here, and `holdfast, user and global` decides about two limits in that time.",
	},
	{
		"shop",
		[]string{"whole shop / bare SQL"},
		"The bare shop has the lock and nothing else. A hold of ours also has two limits, a key in two tiers, a record, an event, and its relay, broker, consumer and read model, all on the same two cores.",
	},
	{
		"shop",
		[]string{"whole shop / at commit fd0b5d8"},
		"The earlier commit has the same layers, and a hold of it writes the same rows.",
	},
}
