package inboxtest

import (
	"cmp"
	"context"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
	"github.com/holdfast-go/holdfast/internal/prove"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// New returns an inboxpgx.Store whose entries and ledger are in memory. The Transactor is a
// txretrytest.Manager: an entry is undone when its transaction rolls back. Entries older than
// Config.Retention go when others are written, but for those of parked messages. Config.Entries is ignored.
func New(t txretry.Transactor, consumer string, cfg inboxpgx.Config) (*inboxpgx.Store, error) {
	cfg.Entries = memory.NewEntries(cmp.Or(cfg.Retention, driver.DefaultRetention))
	return inboxpgx.New(t, consumer, cfg)
}

// handlerTime is how long one delivery may take.
const handlerTime = 30 * time.Second

// Prove runs the handler of a message on a real database under faults, as txretrytest.Proof describes.
// start makes a process as your program does: on the pool that it is given, it makes the inboxpgx.Store
// and registers the handlers. Each attempt is one delivery of the message, which comes again until it is
// processed, or until its error makes it a dead letter, which is a failure. The message needs a Name and
// a Body. An ID that it lacks is made up, and reads <key> in Proof.Rows: one for all schedules, or, with
// Proof.Effects, one for each, so that another side that deduplicates by it is asked anew. With an ID of
// yours, Proof.Reset must reset the other side too.
func Prove(t txretrytest.TB, p txretrytest.Proof, m inbox.Message, start func(pool *pgxpool.Pool) (inbox.Processor, error)) {
	t.Helper()
	work := prove.Work{
		Name: "inboxtest.Prove", Keyed: true,
		Start: func(_ context.Context, pool *pgxpool.Pool) (func(ctx context.Context) prove.Outcome, error) {
			processor, err := start(pool)
			sent := m
			return func(ctx context.Context) prove.Outcome { return deliver(ctx, processor, sent) }, err
		},
	}
	if m.ID == uuid.Nil {
		work.Fresh = func() uuid.UUID {
			m.ID = uuid.Must(uuid.NewV7())
			return m.ID
		}
	}
	prove.Run(t, prove.Proof(p), work)
}

func deliver(ctx context.Context, p inbox.Processor, m inbox.Message) prove.Outcome {
	ctx, cancel := context.WithTimeout(ctx, handlerTime)
	defer cancel()
	err := p.Process(ctx, []*inbox.Message{&m})[0]
	return prove.Outcome{Err: err, GivenUp: driver.Classify(err).Action == driver.ActionDead}
}
