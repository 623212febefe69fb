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
		"txretry", []string{"of raw one-trip begin", "x plain five trips with INSERT by hand"},
		"The distance is smaller than the spread of the rounds. Both send the same statements in the same round trips.",
	},
	{
		"txretry", []string{"x the sequential rate, SerialKey and Combine, 1 row"},
		"Calls that share a transaction share BEGIN and COMMIT. Each still sends a SELECT and an UPDATE of its own, one after the other on one connection. " +
			"The row `one connection, 16 calls a COMMIT` is the same by hand, and is the bound.",
	},
	{
		"outbox", []string{"of publish alone, raw client, unkeyed", "of publish alone, raw, the same messages, unkeyed", "x river, 2000 workers, fetch cooldown 1 ms, unkeyed"},
		"The processors are busy. A relay also claims, reads and deletes, on the same two cores as the broker and Postgres. " +
			"Where publishing alone has a rate p and `claim and settle alone` a rate c, both together have 1/(1/p + 1/c) of them at best. " +
			"The row `publish alone, raw, the same messages` shows what the headers cost.",
	},
	{
		"outbox", []string{"of unkeyed, 1,000 keys"},
		"For each message with a key a claim looks for a waiting one before it, and a settlement for one of its key that failed. That is one index look each.",
	},
	{
		"outbox", []string{"of unkeyed, 10 keys"},
		"The next message of a key leaves when the one before is confirmed, so ten keys have ten messages under way. " +
			"One that leaves sooner overtakes one that fails: `the next of a key is sent before the confirm` is a planted bug, which the simulation finds.",
	},
	{
		"outbox", []string{"x raw, NOTIFY in the transaction, p50", "x raw, NOTIFY in the transaction, p99"},
		"The raw relay reads without a lease, so that two of them would publish twice, and its NOTIFY takes a lock of all committing sessions. " +
			"A claim is a transaction with a lease. A Notifier is another connection, whose NOTIFY is one more trip after the commit, and which gathers those of 2 ms.",
	},
	{
		"inbox", []string{"of raw, its dedup entry in one trip with BEGIN"},
		"The raw consumer sends the same statements in the same trips. What is missing is this process's own time, in `client us/message`: " +
			"a span, metrics, the checks of a message and the two goroutines it passes.",
	},
	{
		"inbox", []string{"x one worker, a batch handler, 2 workers"},
		"One worker keeps both cores busy: a batch is a few statements, which Postgres carries out while the broker and this process prepare the next. " +
			"A second one adds transactions that wait for the same core.",
	},
	{
		"expiry", []string{"of raw pgx, two statements, sweepers: 4"},
		"Four sweepers keep both cores busy, and each row costs this process its decoding and its event.",
	},
	{
		"idempotency", []string{"us over the bare handler, first run in memory", "allocations over the bare handler, first run in memory"},
		"What is left is what a request has to have: its key, a fingerprint, a recorder, a copy of the answer, a context with a lease, and the record in the store.",
	},
	{
		"idempotency", []string{"of raw redis"},
		"The raw client sends SET, we send a script: hashes of seven fields, a lock with a token, and one reply for each state. " +
			"With 50 clients the store gathers calls and passes the raw one; the middleware's own time is added then.",
	},
	{
		"idempotency", []string{"of raw postgres, INSERT .. DO NOTHING, then UPDATE"},
		"The raw table has two columns and one index. A record has twelve, of which a lease, a token, a fingerprint and an end that is indexed, so that old records can be pruned.",
	},
	{
		"idempotency", []string{"of raw postgres, SELECT, replay", "of raw postgres, SELECT, no gate, replay"},
		"The processors are busy. The raw client reads one column of one row by one prepared statement; a replay also decodes the headers, compares the fingerprint and writes an answer over HTTP.",
	},
	{
		"idempotency", []string{"of transaction alone, no gate, first run", "of the transaction alone, two tiers"},
		"The row `transaction and record by hand` sends the least that keeps an answer: it misses the goal, too. A record is a row more to write, in a table with two indexes.",
	},
	{
		"ratelimit", []string{"of raw EVALSHA by AutoPipeline"},
		"A call for two limits sends two keys and gets two results; the raw one has one counter.",
	},
	{
		"shop", []string{"whole shop / bare SQL", "whole shop / at commit fd0b5d8"},
		"The processors are busy with 50 clients, most of all Postgres. A hold of the shop has a limiter, a key, a record, an event and its relay, consumer and read model; the bare one has none of them.",
	},
}
