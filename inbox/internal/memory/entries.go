package memory

import (
	"context"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	pgxdriver "github.com/holdfast-go/holdfast/inbox/inboxpgx/driver"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// Entries is a driver.Entries of inboxpgx for transactions of txretrytest, those of one manager.
// What is older than the retention goes when others are written, unless it is parked. It is safe for concurrent use.
type Entries struct {
	retention time.Duration

	mu       sync.Mutex
	ledgers  map[string]*Ledger
	parkings map[string]*Parking
	since    map[entry]time.Time
	order    []entry // oldest first
}

// countLimit is where Processed stops.
const countLimit = 100_000

type entry struct {
	consumer string
	id       uuid.UUID
}

// NewEntries returns an Entries without any.
func NewEntries(retention time.Duration) *Entries {
	return &Entries{retention: retention, ledgers: map[string]*Ledger{}, parkings: map[string]*Parking{}, since: map[entry]time.Time{}}
}

// Record implements driver.Entries. It fails when tx is not an open transaction of txretrytest.
func (e *Entries) Record(_ context.Context, tx pgx.Tx, consumer string, id uuid.UUID, key string) (first bool, err error) {
	of, place := entry{consumer, id}, e.parking(consumer)
	err = txretrytest.Effect(tx, func() { first = (key == "" || !place.stopped(key)) && e.insert(of) }, func() {
		if first {
			e.remove(of)
		}
	})
	return first, err
}

// RecordAll implements driver.Entries.
func (e *Entries) RecordAll(ctx context.Context, tx pgx.Tx, consumer string, msgs []*inbox.Message, keys []string) (first []bool, err error) {
	first = make([]bool, len(msgs))
	for i, m := range msgs {
		key := ""
		if keys != nil {
			key = keys[i]
		}
		if first[i], err = e.Record(ctx, tx, consumer, m.ID, key); err != nil {
			return nil, err
		}
	}
	return first, nil
}

// Recorded implements driver.Entries.
func (e *Entries) Recorded(_ context.Context, consumer string, ids []uuid.UUID) ([]bool, error) {
	recorded := make([]bool, len(ids))
	for i, id := range ids {
		recorded[i] = e.Seen(consumer, id)
	}
	return recorded, nil
}

// Forget implements driver.Entries.
func (e *Entries) Forget(_ context.Context, tx pgx.Tx, consumer string, ids []uuid.UUID) error {
	for _, id := range ids {
		key := entry{consumer, id}
		if err := txretrytest.Effect(tx, func() { e.remove(key) }, func() { e.insert(key) }); err != nil {
			return err
		}
	}
	return nil
}

// Processed implements driver.Entries.
func (e *Entries) Processed(_ context.Context, consumer string, d time.Duration) (n int, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	since := time.Now().Add(-d)
	for key, at := range e.since {
		if key.consumer == consumer && at.After(since) {
			n++
		}
	}
	return min(n, countLimit), nil
}

// Ledger implements driver.Entries.
func (e *Entries) Ledger(consumer string) driver.Ledger {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.ledgers[consumer] == nil {
		e.ledgers[consumer] = NewLedger()
	}
	return e.ledgers[consumer]
}

// Parking implements driver.Entries.
func (e *Entries) Parking(consumer string) pgxdriver.Parking { return e.parking(consumer) }

func (e *Entries) parking(consumer string) *Parking {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.parkings[consumer] == nil {
		e.parkings[consumer] = newParking(e, consumer)
	}
	return e.parkings[consumer]
}

// Seen reports whether the consumer has recorded the id.
func (e *Entries) Seen(consumer string, id uuid.UUID) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	_, known := e.since[entry{consumer, id}]
	return known
}

func (e *Entries) insert(key entry) (first bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	now := time.Now()
	e.prune(now)
	if _, known := e.since[key]; known {
		return false
	}
	e.since[key] = now
	e.order = append(e.order, key)
	return true
}

// prune drops what is older than the retention and not parked. The lock is held.
func (e *Entries) prune(now time.Time) {
	n := 0
	var kept []entry
	for ; n < len(e.order); n++ {
		key := e.order[n]
		since, known := e.since[key]
		if known && now.Sub(since) <= e.retention {
			break
		}
		if place := e.parkings[key.consumer]; known && place != nil && place.has(key.id) {
			kept = append(kept, key)
			continue
		}
		delete(e.since, key)
	}
	n -= copy(e.order[n-len(kept):], kept)
	e.order = e.order[n:]
}

func (e *Entries) remove(key entry) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.since, key)
}
