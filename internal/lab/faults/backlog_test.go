package faults_test

import (
	"context"
	"encoding/json"
	"errors"
	"runtime/metrics"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

// backlogSQL writes $1 messages of 512 bytes: a half of them with one of 1,000 keys.
const backlogSQL = `
INSERT INTO holdfast_outbox (id, lane, name, body, content_type, ordering_key)
SELECT (lpad(to_hex(i >> 16), 8, '0') || '-0000-7000-8000-' || lpad(to_hex(i), 12, '0'))::uuid, k % 16, 'faults.done', $2::bytea, 'application/json',
       CASE WHEN i % 2 = 0 THEN 'key ' || k END
FROM (SELECT i, i / 2 % 1000 AS k FROM generate_series(1, $1::int) i) g`

// confirms is a publisher that costs nothing, so that Postgres alone sets the pace.
type confirms struct{}

func (confirms) Publish(_ context.Context, _ driver.Message, done func(error)) { done(nil) }

// counting is a store that tells of what was settled as published.
type counting struct {
	*outboxpgx.Store
	published func(n int)
}

func (c counting) Settle(ctx context.Context, b driver.Batch, settlements []driver.Settlement) ([]driver.Lease, error) {
	stale, err := c.Store.Settle(ctx, b, settlements)
	if err == nil && len(stale) == 0 {
		c.published(len(settlements))
	}
	return stale, err
}

// drainAll has a relay with the default settings publish exactly n messages, and calls during with
// how many are done until it has. It returns how long that took.
func drainAll(ctx context.Context, pool *pgxpool.Pool, n int64, during func(done int64)) (time.Duration, error) {
	store, err := outboxpgx.New(pool, outboxpgx.Config{Logger: quiet})
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var done atomic.Int64
	relay, err := outbox.NewRelay(counting{store, func(n int) { done.Add(int64(n)) }}, confirms{}, outbox.RelayConfig{
		Logger: quiet,
	})
	if err != nil {
		return 0, err
	}
	ended := make(chan error, 1)
	began := time.Now()
	go func() { ended <- relay.Run(ctx) }()
	for done.Load() < n && ctx.Err() == nil {
		during(done.Load())
		time.Sleep(5 * time.Millisecond)
	}
	took := time.Since(began)
	cancel()
	if err := <-ended; err != nil {
		return 0, err
	}
	if got := done.Load(); got != n {
		return 0, errors.New("not every message was published once")
	}
	return took, nil
}

// backlogJob is a backlog to drain in a process of its own, whose memory nobody else uses.
type backlogJob struct {
	Database string
	Messages int64
}

// backlogReport holds the most memory in use in the first quarter of the messages and in the rest.
type backlogReport struct {
	Seconds     float64
	First, Rest memory
}

// memory is in bytes.
type memory struct {
	Heap uint64 // objects, live and not yet collected: HeapAlloc
	Live uint64 // what the last collection found alive
}

func backlogRole(ctx context.Context, job []byte, ready func()) (any, error) {
	var j backlogJob
	if err := json.Unmarshal(job, &j); err != nil {
		return nil, err
	}
	pool, err := pgxpool.New(ctx, j.Database)
	if err != nil {
		return nil, err
	}
	defer pool.Close()
	ready()
	var report backlogReport
	took, err := drainAll(ctx, pool, j.Messages, func(done int64) {
		if done < j.Messages/4 {
			report.First.raise()
		} else {
			report.Rest.raise()
		}
	})
	report.Seconds = took.Seconds()
	return report, err
}

// raise takes a sample and keeps the greatest.
func (m *memory) raise() {
	samples := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}, {Name: "/gc/heap/live:bytes"}}
	metrics.Read(samples)
	m.Heap = max(m.Heap, samples[0].Value.Uint64())
	m.Live = max(m.Live, samples[1].Value.Uint64())
}
