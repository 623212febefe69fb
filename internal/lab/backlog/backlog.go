// Package backlog fills an outbox with SQL, and drains it without a broker, so that only Postgres and the
// relay set the pace.
package backlog

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/metrics"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

// Name is the name of every message. The consumers of package ledger handle it.
const Name = "faults.done"

// Body returns valid JSON of size bytes, at least 2.
func Body(size int) []byte { return fmt.Appendf(nil, `"%s"`, bytes.Repeat([]byte("x"), size-2)) }

// fillSQL writes the messages $1 to $2. Half of them have one of 1,000 keys.
const fillSQL = `
INSERT INTO holdfast_outbox (id, lane, name, body, content_type, ordering_key)
SELECT (lpad(to_hex(i >> 16), 8, '0') || '-0000-7000-8000-' || lpad(to_hex(i), 12, '0'))::uuid, k % 16, '` + Name + `', $3::bytea, 'application/json',
       CASE WHEN i % 2 = 0 THEN 'key ' || k END
FROM (SELECT i, i / 2 % 1000 AS k FROM generate_series($1::bigint, $2::bigint) i) g`

// step is how many messages Fill commits at once.
const step = 500_000

// Fill writes n messages with that body, numbered from first. Two fills of a table must not share numbers.
// It leaves the table vacuumed.
func Fill(ctx context.Context, pool *pgxpool.Pool, first, n int64, body []byte) error {
	for end := first + n; first < end; first += step {
		if _, err := pool.Exec(ctx, fillSQL, first, min(first+step, end)-1, body); err != nil {
			return err
		}
	}
	_, err := pool.Exec(ctx, "VACUUM (ANALYZE) holdfast_outbox")
	return err
}

// Confirms is a publisher that confirms every message at once.
type Confirms struct{}

// Publish implements driver.Publisher.
func (Confirms) Publish(_ context.Context, _ driver.Message, done func(error)) { done(nil) }

// Counting is a store that reports the number of messages settled as published, from any goroutine.
type Counting struct {
	*outboxpgx.Store
	Published func(n int)
}

// Settle implements driver.Source.
func (c Counting) Settle(ctx context.Context, b driver.Batch, settlements []driver.Settlement) (driver.Settled, error) {
	settled, err := c.Store.Settle(ctx, b, settlements)
	if err == nil && len(settled.Stale) == 0 {
		c.Published(len(settlements))
	}
	return settled, err
}

// unanswered is the time without progress after which Drain checks the table. A shorter stop is only a
// pause.
const unanswered = 10 * time.Second

// Drain publishes n messages of the table with a relay in default settings. The table must have at least n
// messages. Drain calls during with the number of published messages, some hundred times a second. It
// returns that number when the relay was told to stop, and the time it took. A batch whose COMMIT is not
// answered in time is settled but not counted, so Drain also ends when the table is empty.
func Drain(ctx context.Context, pool *pgxpool.Pool, n int64, during func(done int64)) (int64, time.Duration, error) {
	quiet := slog.New(slog.DiscardHandler)
	store, err := outboxpgx.New(pool, outboxpgx.Config{Logger: quiet})
	if err != nil {
		return 0, 0, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var done atomic.Int64
	relay, err := outbox.NewRelay(Counting{store, func(n int) { done.Add(int64(n)) }}, Confirms{}, outbox.RelayConfig{Logger: quiet})
	if err != nil {
		return 0, 0, err
	}
	ended := make(chan error, 1)
	began := time.Now()
	go func() { ended <- relay.Run(ctx) }()
	published, moved := int64(0), began
	for published < n && ctx.Err() == nil {
		during(published)
		time.Sleep(5 * time.Millisecond)
		if now := done.Load(); now > published {
			published, moved = now, time.Now()
		} else if time.Since(moved) > unanswered {
			moved = time.Now()
			if isEmpty(ctx, pool) {
				published = n
			}
		}
	}
	took := time.Since(began)
	cancel()
	if err := <-ended; err != nil {
		return 0, 0, err
	}
	if published < n {
		return 0, 0, errors.New("the drain was cancelled")
	}
	return published, took, nil
}

// isEmpty reports whether the table is known to be empty.
func isEmpty(ctx context.Context, pool *pgxpool.Pool) bool {
	var rows bool
	err := pool.QueryRow(ctx, "SELECT EXISTS (SELECT FROM holdfast_outbox)").Scan(&rows)
	return err == nil && !rows
}

// Memory is the memory in use by this process, in bytes.
type Memory struct {
	Heap uint64 // objects, live and not yet collected: HeapAlloc
	Live uint64 // live after the last collection
}

// Raise takes a sample and keeps the maximum.
func (m *Memory) Raise() {
	samples := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}, {Name: "/gc/heap/live:bytes"}}
	metrics.Read(samples)
	m.Heap = max(m.Heap, samples[0].Value.Uint64())
	m.Live = max(m.Live, samples[1].Value.Uint64())
}
