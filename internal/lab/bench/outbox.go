package main

import (
	"context"
	"fmt"

	amqp "github.com/rabbitmq/amqp091-go"
)

func outboxWorkload() workload {
	return workload{"outbox", []part{
		{"classic", benchClassic},
		{"quorum", benchQuorum},
		{"latency", benchLatency},
		{"write", benchWrite},
		{"database-sql", benchDatabaseSQL},
		{"idle", benchIdle},
		{"snapshot", benchSnapshot},
	}}
}

// Names of contenders that goals refer to.
const (
	publishAlone  = "publish alone, raw client"
	publishSame   = "publish alone, raw, the same messages"
	unkeyed       = "holdfast, unkeyed"
	readAndDelete = "read and delete alone, raw"
	claimAlone    = "claim and settle alone"
	manyKeys      = "holdfast, 1,000 keys"
	fewKeys       = "holdfast, 10 keys"
	riverBest     = "river, 2000 workers, fetch cooldown 1 ms"
	watermillBest = "watermill forwarder, 64 topics, batch 1000"
)

type queueKind struct {
	name string
	args amqp.Table
}

var queueKinds = [...]queueKind{{"classic", nil}, {"quorum", amqp.Table{"x-queue-type": "quorum"}}}

func benchClassic(ctx context.Context, b *bench) {
	benchDrain(ctx, b, queueKinds[0], 0.85, 1.8)
}

func benchQuorum(ctx context.Context, b *bench) {
	benchDrain(ctx, b, queueKinds[1], 0.80, 2)
}

// benchDrain empties a table of persistent messages of 512 bytes into a queue, with
// confirms. Its goals: the share of what the bare client publishes, and the factor over
// the peers.
func benchDrain(ctx context.Context, b *bench, kind queueKind, share, factor float64) {
	d := newDrain(ctx, b, kind.args)
	r := b.measure(ctx, table{
		title:      fmt.Sprintf("outbox, %d messages of %d bytes to a %s queue", b.messages, len(body), kind.name),
		columns:    []column{{name: "messages/s"}, {name: "client us/message", decimals: 1}},
		yardsticks: []string{publishAlone, publishSame, unkeyed},
		contenders: []contender{
			d.contender(publishAlone, 1, d.publishAlone),
			d.contender(publishSame, 1, d.publishSame),
			d.contender("publish alone, outboxamqp", 1, d.publisherAlone),
			d.contender(readAndDelete, 1, d.rawClaim),
			d.contender(claimAlone, 1, d.claimAlone),
			d.contender(unkeyed, 1, d.holdfast(0)),
			d.contender(manyKeys, 1, d.holdfast(1000)),
			d.contender(fewKeys, 5, d.holdfast(10)), // a key has one message in flight
			d.contender("holdfast, 1 key", 50, d.holdfast(1)),
			d.contender(riverBest, 1, d.river),
			d.contender(watermillBest, 1, d.watermill),
		},
	})
	for _, limit := range []string{publishAlone, publishSame} {
		b.atLeast(share, r.ratio(unkeyed, limit), fmt.Sprintf("of %s, unkeyed, %s", limit, kind.name))
	}
	if kind.args != nil { // a classic queue is slowed down by the headers of a key
		b.atLeast(0.92, r.ratio(manyKeys, unkeyed), fmt.Sprintf("of unkeyed, 1,000 keys, %s", kind.name))
		b.atLeast(0.6, r.ratio(fewKeys, unkeyed), fmt.Sprintf("of unkeyed, 10 keys, %s", kind.name))
	}
	for _, peer := range []string{riverBest, watermillBest} {
		b.atLeast(factor, r.ratio(unkeyed, peer), fmt.Sprintf("x %s, unkeyed, %s", peer, kind.name))
	}
}
