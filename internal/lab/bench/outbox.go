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
	}}
}

// Names of contenders that goals refer to.
const (
	publishAlone  = "publish alone, raw client"
	unkeyed       = "holdfast, unkeyed"
	fewKeys       = "holdfast, 10 keys"
	riverBest     = "river, 2000 workers, fetch cooldown 1 ms"
	watermillBest = "watermill forwarder, 64 topics, batch 1000"
)

type queueKind struct {
	name string
	args amqp.Table
}

var queueKinds = [...]queueKind{{"classic", nil}, {"quorum", amqp.Table{"x-queue-type": "quorum"}}}

// benchClassic compares with the peers, too.
func benchClassic(ctx context.Context, b *bench) {
	d := newDrain(ctx, b, queueKinds[0].args)
	r := d.measure(ctx, "classic",
		d.contender(riverBest, 1, d.river),
		d.contender(watermillBest, 1, d.watermill),
	)
	b.atLeast(0.85, r.ratio(unkeyed, publishAlone), fmt.Sprintf("of %s, unkeyed, classic", publishAlone))
	for _, peer := range []string{riverBest, watermillBest} {
		b.atLeast(1.8, r.ratio(unkeyed, peer), fmt.Sprintf("x %s, unkeyed, classic", peer))
	}
}

// benchQuorum has ordered messages, too: a key has one message in flight.
func benchQuorum(ctx context.Context, b *bench) {
	d := newDrain(ctx, b, queueKinds[1].args)
	r := d.measure(ctx, "quorum", d.contender(fewKeys, 5, d.holdfast(10)))
	b.atLeast(0.8, r.ratio(unkeyed, publishAlone), fmt.Sprintf("of %s, unkeyed, quorum", publishAlone))
	b.atLeast(0.6, r.ratio(fewKeys, unkeyed), "of unkeyed, 10 keys, quorum")
}

// measure empties a table of persistent messages of 512 bytes into a queue, with confirms.
func (d *drain) measure(ctx context.Context, kind string, others ...contender) results {
	return d.bench.measure(ctx, table{
		title:      fmt.Sprintf("outbox, %d messages of %d bytes to a %s queue", d.bench.messages, len(body), kind),
		columns:    []string{"messages/s", "client us/message"},
		yardsticks: []string{publishAlone, unkeyed},
		contenders: append([]contender{
			d.contender(publishAlone, 1, d.publishAlone),
			d.contender("claim and settle alone", 1, d.claimAlone),
			d.contender(unkeyed, 1, d.holdfast(0)),
		}, others...),
	})
}
