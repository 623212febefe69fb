package main

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/internal/lab/backlog"
	"github.com/holdfast-go/holdfast/internal/lab/load"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/outbox"
)

const (
	// heldBytes is what a minute takes on disk at most: no dead row can be removed.
	heldBytes = 400 << 20
	// heldSlices is into how many rows the time of the snapshot is divided.
	heldSlices = 5
	// besideSnapshot is how much more a message may cost while no dead row can be removed. Each claim walks over the dead
	// versions of the sixteen lanes. The dearer that gets, the more messages wait for the next claim, and the fewer claims
	// there are: so the cost rises for some minutes and then falls.
	besideSnapshot = 4
	// keptPace is the part of the pace that is reached at least.
	keptPace = 0.9
	// backlogSeconds is how many seconds' messages may wait at the end of a slice.
	backlogSeconds = 5
)

// held is an outbox with writers at an even pace and a relay, beside which a snapshot is held for a while.
type held struct {
	*base
	sizes
	outbox    *outboxTable
	published atomic.Int64
	rate      float64
	table     table
}

// soakSnapshot measures writers and a relay before, while and after a transaction holds an old snapshot, which
// keeps Postgres from removing dead rows. They run at half of the rate that they reach without it.
func soakSnapshot(ctx context.Context, s sizes, r *report) (err error) {
	b, err := openBase(ctx, s.clients, int64(s.minutes*heldBytes))
	if err != nil {
		return err
	}
	defer b.close()
	h := &held{base: b, sizes: s}
	if h.outbox, err = b.newOutbox(ctx, "held", s.body); err != nil {
		return err
	}
	h.table = table{Title: "One message, from its write to its settlement, is one operation", Columns: append(costColumns, "p50 of a write", "wait at the end", "dead messages", "dead rows of lanes", "size of both")}
	stop, err := h.startRelay(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	if err := h.capacity(ctx, r); err != nil {
		return err
	}
	slice := max(s.length()/heldSlices, time.Second)
	before, err := h.slice(ctx, "before", slice)
	if err != nil {
		return err
	}
	during, err := h.underSnapshot(ctx, slice)
	if err != nil {
		return err
	}
	// What has piled up is cleaned first, as autovacuum does within a minute.
	if _, err := h.outbox.pool.Exec(ctx, "VACUUM holdfast_outbox, holdfast_outbox_lanes"); err != nil {
		return err
	}
	after, err := h.slice(ctx, "after", slice)
	if err != nil {
		return err
	}
	r.Tables = append(r.Tables, h.table)
	dearest := 0.0
	for _, m := range during {
		dearest = max(dearest, m.postgresPerOp())
	}
	r.atMost("A message while the snapshot is held, µs of Postgres at most", before.postgresPerOp(), dearest, besideSnapshot)
	r.atMost("A message after the snapshot, µs of Postgres", before.postgresPerOp(), after.postgresPerOp(), noDearer)
	for _, m := range append(during, after) {
		r.find(m.rate() >= keptPace*h.rate, "%.0f messages a second are published in %q: at least %.0f %% of the %.0f of the pace", m.rate(), m.name, 100*keptPace, h.rate)
		r.find(float64(m.waits) <= backlogSeconds*h.rate, "%d messages wait at the end of %q: at most those of %d s", m.waits, m.name, backlogSeconds)
	}
	return nil
}

// startRelay runs a relay with the default settings until stop is called.
func (h *held) startRelay(ctx context.Context) (stop func() error, err error) {
	source := backlog.Counting{Store: h.outbox.store, Published: func(n int) { h.published.Add(int64(n)) }}
	relay, err := outbox.NewRelay(source, backlog.Confirms{}, outbox.RelayConfig{Logger: quiet})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- relay.Run(ctx) }()
	return func() error {
		cancel()
		return <-ended
	}, nil
}

// capacity finds what writers and relay manage together, and sets half of that as the pace.
func (h *held) capacity(ctx context.Context, r *report) error {
	c, err := h.measure(func() (int64, error) {
		began := h.published.Load()
		_, err := load.Drive(ctx, h.sizes.clients, h.stretch(), h.outbox.write)
		return h.published.Load() - began, err
	})
	if err != nil {
		return err
	}
	h.rate = c.rate() / 2
	r.note("%d writers and a relay manage %.0f messages a second here; the pace is half of that.", h.sizes.clients, c.rate())
	for { // what waits is no part of what follows
		n, err := h.outbox.waiting(ctx)
		if err != nil || n == 0 {
			return err
		}
		if err := runloop.Sleep(ctx, 100*time.Millisecond); err != nil {
			return err
		}
	}
}

// heldSlice is what was measured in a slice of the time.
type heldSlice struct {
	cost
	name  string
	waits int64
}

func (h *held) slice(ctx context.Context, name string, length time.Duration) (m heldSlice, err error) {
	m.name = name
	var written load.Load
	m.cost, err = h.measure(func() (int64, error) {
		began := h.published.Load()
		var err error
		written, err = load.DriveAt(ctx, h.sizes.clients, h.rate, length, h.outbox.write)
		return h.published.Load() - began, err
	})
	if err != nil {
		return m, err
	}
	var dead, deadLanes, size int64
	err = h.outbox.pool.QueryRow(ctx, `SELECT (`+waitingSQL+`), pg_stat_get_dead_tuples('holdfast_outbox'::regclass), pg_stat_get_dead_tuples('holdfast_outbox_lanes'::regclass),
		pg_total_relation_size('holdfast_outbox') + pg_total_relation_size('holdfast_outbox_lanes')`).Scan(&m.waits, &dead, &deadLanes, &size)
	h.table.add(append(m.cells(name), decimals(written.Percentile(0.5).Seconds()*1000, 1)+" ms",
		fmt.Sprint(m.waits), fmt.Sprint(dead), fmt.Sprint(deadLanes), bytesText(size))...)
	return m, err
}

// underSnapshot is slice, some times, while a transaction that has looked once stays open.
func (h *held) underSnapshot(ctx context.Context, slice time.Duration) (all []heldSlice, err error) {
	tx, err := h.outbox.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, tx.Rollback(ctx)) }()
	if _, err := tx.Exec(ctx, "SELECT"); err != nil {
		return nil, err
	}
	began := time.Now()
	for range heldSlices {
		m, err := h.slice(ctx, fmt.Sprintf("snapshot of %v", time.Since(began).Round(time.Second)), slice)
		if err != nil {
			return nil, err
		}
		all = append(all, m)
	}
	return all, nil
}
