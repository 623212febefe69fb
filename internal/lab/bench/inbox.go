package main

import (
	"context"
	"fmt"
)

func inboxWorkload() workload {
	return workload{"inbox", []part{
		{"1", func(ctx context.Context, b *bench) { benchInboxSingle(ctx, b, 1, 20) }},
		{"8", func(ctx context.Context, b *bench) { benchInboxSingle(ctx, b, 8, 8) }},
		{"batch", benchInboxBatch},
	}}
}

// Names of contenders that goals refer to.
const (
	rawFolded      = "raw, its dedup entry in one trip with BEGIN"
	rawBatch       = "raw, a transaction per 200"
	inboxSingle    = "holdfast"
	inboxMany      = "holdfast, batches of 200, a batch handler"
	watermillInbox = "watermill router, dedup insert"
)

var inboxColumns = []string{"messages/s", "client us/message"}

// benchInboxSingle has so many handlers work side by side, each message in a transaction of
// its own: the dedup entry and one business row, SERIALIZABLE.
func benchInboxSingle(ctx context.Context, b *bench, handlers, part int) {
	i := newIntake(ctx, b)
	r := b.measure(ctx, table{
		title:      fmt.Sprintf("inbox, %d handlers, %d messages of %d bytes, classic queue", handlers, b.messages/part, len(body)),
		columns:    inboxColumns,
		yardsticks: []string{rawFolded, watermillInbox},
		contenders: []contender{
			i.contender(rawFolded, part, i.rawSingle(handlers)),
			i.contender(inboxSingle, part, i.holdfast(handlers, 1, i.perMessage)),
			i.contender(watermillInbox, part, i.watermill(handlers)),
		},
	})
	b.atLeast(0.95, r.ratio(inboxSingle, rawFolded), fmt.Sprintf("of %s, %d handlers", rawFolded, handlers))
}

// benchInboxBatch compares one transaction for many messages with a transaction each.
func benchInboxBatch(ctx context.Context, b *bench) {
	i := newIntake(ctx, b)
	r := b.measure(ctx, table{
		title:      fmt.Sprintf("inbox, batches, %d messages of %d bytes, classic queue", b.messages, len(body)),
		columns:    inboxColumns,
		yardsticks: []string{rawBatch, inboxSingle},
		contenders: []contender{
			i.contender(rawBatch, 1, i.rawBatch(200)),
			i.contender(inboxMany, 1, i.holdfast(1, 200, i.batchHandler)),
			i.contender(inboxSingle, 6, i.holdfast(32, 1, i.perMessage)),
		},
	})
	b.atLeast(0.92, r.ratio(inboxMany, rawBatch), "of the raw batch consumer, a batch handler")
}
