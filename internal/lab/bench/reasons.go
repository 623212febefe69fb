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
		[]string{"x crdbpgxv5"},
		"The peer sends a SAVEPOINT and its RELEASE, two round trips more. Where all clients together take both cores, a trip that is saved is worth its processor time alone.",
	},
	{
		"outbox",
		[]string{"of publish alone, raw client, unkeyed", "x river, 2000 workers, fetch cooldown 1 ms, unkeyed"},
		"A relay also claims, reads and deletes, on the same two cores as the broker and Postgres. " +
			"Where publishing alone has a rate p and `claim and settle alone` a rate c, both have about 1/(1/p + 1/c) if they do not overlap.",
	},
	{
		"outbox",
		[]string{"of unkeyed, 10 keys"},
		"The next message of a key leaves when the one before is confirmed, so ten keys have ten messages under way. " +
			"One that left sooner would overtake one that fails. That is a planted bug, `the next of a key is sent before the confirm`, which the simulation finds.",
	},
	{
		"outbox",
		[]string{"x raw, NOTIFY in the transaction, p50"},
		"The raw relay reads without a lease: two of them would publish everything twice. A claim of ours is a transaction that leases lanes. " +
			"A Notifier sends its NOTIFY on another connection after the commit, so that commits of the business do not wait for each other by a NOTIFY's lock. " +
			"That is one more trip, and at least 2 ms lie between two of them.",
	},
	{
		"inbox",
		[]string{"of raw, its dedup entry in one trip with BEGIN"},
		"The raw consumer sends the same statements in the same trips. Ours costs this process more (`client us/message`): " +
			"a message passes a receiver, a worker and an acknowledger, with a span, metrics, and checks of what it holds.",
	},
	{
		"inbox",
		[]string{"of the raw batch consumer, a batch handler"},
		"The broker has the largest share of the processors, and what is left goes to each message's own way: the raw consumer decodes no message, makes no span, " +
			"and sends one acknowledgement for a batch without a look at what became of each.",
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
		[]string{"of raw postgres, SELECT, no gate, replay"},
		"The raw client reads one column. A replay reads the whole record, decodes the headers and compares the fingerprint; the middleware writes the answer, too.",
	},
	{
		"idempotency",
		[]string{"of transaction alone, no gate, first run"},
		"A record is one more row to write, in a table with two indexes.",
	},
	{
		"ratelimit",
		[]string{"of raw EVALSHA by AutoPipeline"},
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
}
