package inboxtest

import (
	"context"
	"sync"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// Dedup is the inboxpgx.Dedup for the transactions of a txretrytest.Manager: entries are
// kept in memory and undone when the transaction rolls back. Use it with one Manager. It is
// safe for concurrent use.
type Dedup struct {
	mu   sync.Mutex
	seen map[entry]bool
}

type entry struct {
	consumer string
	id       uuid.UUID
}

// NewDedup returns a Dedup without entries.
func NewDedup() *Dedup { return &Dedup{seen: map[entry]bool{}} }

// Record implements inboxpgx.Dedup. It fails when tx is not an open transaction of txretrytest.
func (d *Dedup) Record(_ context.Context, tx pgx.Tx, consumer string, id uuid.UUID) (first bool, err error) {
	e := entry{consumer, id}
	err = txretrytest.Effect(tx, func() { first = d.insert(e) }, func() {
		if first {
			d.remove(e)
		}
	})
	return first, err
}

// RecordAll implements inboxpgx.Dedup.
func (d *Dedup) RecordAll(ctx context.Context, tx pgx.Tx, consumer string, msgs []*inbox.Message) (first []bool, err error) {
	first = make([]bool, len(msgs))
	for i, m := range msgs {
		if first[i], err = d.Record(ctx, tx, consumer, m.ID); err != nil {
			return nil, err
		}
	}
	return first, nil
}

// Forget implements inboxpgx.Dedup.
func (d *Dedup) Forget(_ context.Context, tx pgx.Tx, consumer string, ids []uuid.UUID) error {
	for _, id := range ids {
		e := entry{consumer, id}
		err := txretrytest.Effect(tx, func() { d.remove(e) }, func() { d.insert(e) })
		if err != nil {
			return err
		}
	}
	return nil
}

// Seen reports whether the consumer has recorded the id.
func (d *Dedup) Seen(consumer string, id uuid.UUID) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.seen[entry{consumer, id}]
}

func (d *Dedup) insert(e entry) (first bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	first = !d.seen[e]
	d.seen[e] = true
	return first
}

func (d *Dedup) remove(e entry) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.seen, e)
}
