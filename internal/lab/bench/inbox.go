package main

import (
	"context"
	"fmt"
)

func inboxWorkload() workload {
	return workload{"inbox", []part{
		{"1", func(ctx context.Context, b *bench) { benchInboxSingle(ctx, b, 1, 20) }},
		{"8", func(ctx context.Context, b *bench) { benchInboxSingle(ctx, b, 8, 8) }},
		{"32", func(ctx context.Context, b *bench) { benchInboxSingle(ctx, b, 32, 6) }},
		{"batch", benchInboxBatch},
		{"streams", benchInboxStreams},
	}}
}

// Names of contenders that goals refer to.
const (
	rawSingle      = "raw, a transaction each"
	rawFolded      = "raw, its dedup entry in one trip with BEGIN"
	rawBatch       = "raw, a transaction per 200"
	inboxSingle    = "holdfast"
	inboxFew       = "holdfast, 4 workers"
	inboxNoDedup   = "holdfast, no dedup"
	inboxSavepoint = "holdfast, batches of 200, a handler per message"
	inboxMany      = "holdfast, batches of 200, a batch handler"
	inboxManyTwo   = inboxMany + ", 2 workers"

	inboxSavepointFour = inboxSavepoint + ", 4 workers"

	watermillInbox = "watermill router, dedup insert"
)

var inboxColumns = []column{{name: "messages/s"}, {name: "client us/message", decimals: 1}}

// benchInboxSingle has so many handlers work side by side, each message in a transaction of
// its own: the dedup entry and one business row, SERIALIZABLE.
func benchInboxSingle(ctx context.Context, b *bench, handlers, part int) {
	i := newIntake(ctx, b)
	r := b.measure(ctx, table{
		title:      fmt.Sprintf("inbox, %d handlers, %d messages of %d bytes, classic queue", handlers, b.messages/part, len(body)),
		columns:    inboxColumns,
		yardsticks: []string{rawSingle, rawFolded, inboxNoDedup, watermillInbox},
		contenders: []contender{
			i.contender(rawSingle, part, i.rawSingle(handlers, i.rawPlain)),
			i.contender(rawFolded, part, i.rawSingle(handlers, i.rawFolded)),
			i.contender(inboxSingle, part, i.holdfast(handlers, 1, i.perMessage)),
			i.contender(inboxNoDedup, part, i.holdfast(handlers, 1, i.noDedup)),
			i.contender("holdfast on Redis", part, i.holdfast(handlers, 1, i.onRedis)),
			i.contender("holdfast on Postgres, Redis before it", part, i.holdfast(handlers, 1, i.redisFirst)),
			i.contender(watermillInbox, part, i.watermill(handlers)),
		},
	})
	for _, raw := range []string{rawSingle, rawFolded} {
		b.atLeast(0.95, r.ratio(inboxSingle, raw), fmt.Sprintf("of %s, %d handlers", raw, handlers))
	}
}

// benchInboxBatch compares one transaction for many messages with the best of the others.
func benchInboxBatch(ctx context.Context, b *bench) {
	i := newIntake(ctx, b)
	const most = 32
	r := b.measure(ctx, table{
		title:      fmt.Sprintf("inbox, batches, %d messages of %d bytes, classic queue", b.messages, len(body)),
		columns:    inboxColumns,
		yardsticks: []string{rawBatch, inboxSingle, watermillInbox},
		contenders: []contender{
			i.contender(rawBatch, 1, i.rawBatch(200)),
			i.contender(inboxMany, 1, i.holdfast(1, 200, i.batchHandler)),
			i.contender(inboxManyTwo, 1, i.holdfast(2, 200, i.batchHandler)),
			i.contender(inboxSavepoint, 3, i.holdfast(1, 200, i.perMessage)),
			i.contender(inboxSavepointFour, 2, i.holdfast(4, 200, i.perMessage)),
			i.contender(inboxFew, 8, i.holdfast(4, 1, i.perMessage)),
			i.contender(inboxSingle, 6, i.holdfast(most, 1, i.perMessage)),
			i.contender(watermillInbox, 6, i.watermill(most)),
		},
	})
	b.atLeast(0.92, r.ratio(inboxMany, rawBatch), "of the raw batch consumer, a batch handler")
	b.atLeast(5, r.ratio(inboxMany, watermillInbox), fmt.Sprintf("x watermill with %d handlers, a batch handler", most))
	b.atLeast(1.2, r.ratio(inboxManyTwo, inboxMany), "x one worker, a batch handler, 2 workers")
	b.atLeast(1.2, r.ratio(inboxSavepointFour, inboxSavepoint), "x one worker, a handler per message in batches, 4 workers")
	for _, single := range []string{inboxFew, inboxSingle} {
		b.atLeast(2, r.ratio(inboxSavepointFour, single), "x "+single+", a handler per message in batches, 4 workers")
	}
}
