package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/internal/lab/backlog"
	"github.com/holdfast-go/holdfast/internal/lab/load"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/outbox"
)

const (
	// messageBytes is the disk space of a message without its body: row, indexes and write-ahead log.
	messageBytes = 600
	// leastDrained is the minimum of messages that a relay drains during a measurement, because the clock of processor
	// time ticks every 10 ms.
	leastDrained = 10_000
	// heapSlack is the growth of a heap that may be chance.
	heapSlack = 4 << 20
)

// waiting compares an outbox with almost no waiting messages with one that has many.
type waiting struct {
	*base
	sizes
	small, large *outboxTable
	table        table
}

// soakWaiting measures writers and a relay next to many waiting messages, publishes them all, and measures both again.
func soakWaiting(ctx context.Context, s sizes, r *report) error {
	b, err := openBase(ctx, s.clients, s.messages*int64(s.body+messageBytes))
	if err != nil {
		return err
	}
	defer b.close()
	w := &waiting{base: b, sizes: s, table: table{Title: "One message is one operation", Columns: append(costColumns, "heap, most", "heap, alive")}}
	if w.small, err = b.newOutbox(ctx, "small", s.body); err != nil {
		return err
	}
	if w.large, err = b.newOutbox(ctx, "large", s.body); err != nil {
		return err
	}
	if err := w.pile(ctx, r); err != nil {
		return err
	}
	during, err := w.look(ctx, fmt.Sprintf("%d wait", s.messages))
	if err != nil {
		return err
	}
	rest, err := w.drainRest(ctx)
	if err != nil {
		return err
	}
	after, err := w.look(ctx, "all of these are published")
	if err != nil {
		return err
	}
	r.Tables = append(r.Tables, w.table)
	r.sameCost("A write beside all that waits", during.write)
	r.sameCost("A message of the relay beside all that waits", during.relay)
	r.sameCost("A write when that is published", after.write)
	r.sameCost("A message of the relay when that is published", after.relay)
	for _, m := range []struct {
		what         string
		small, large uint64
	}{{"heap", during.heaps[0].Heap, max(during.heaps[1].Heap, rest.Heap)}, {"live heap", during.heaps[0].Live, max(during.heaps[1].Live, rest.Live)}} {
		r.find(m.large <= m.small*5/4+heapSlack, "The %s of the relay is %s at most, and %s where next to nothing waits: a quarter and %s more at most",
			m.what, bytesText(int64(m.large)), bytesText(int64(m.small)), bytesText(heapSlack))
	}
	return nil
}

// stage is the result at one number of waiting messages.
type stage struct {
	write, relay compared
	heaps        [2]backlog.Memory // small, large
}

// look runs writers, and then a relay that drains their messages and more, on both tables.
func (w *waiting) look(ctx context.Context, name string) (l stage, err error) {
	if l.write, err = alternate(w.writing(ctx, w.small), w.writing(ctx, w.large)); err != nil {
		return l, err
	}
	further := max(w.messages/100, leastDrained)
	if l.relay, err = alternate(w.draining(ctx, w.small, further, &l.heaps[0]), w.draining(ctx, w.large, further, &l.heaps[1])); err != nil {
		return l, err
	}
	w.table.add(append(total(l.write.small).cells("writers, next to nothing waits"), "", "")...)
	w.table.add(append(total(l.write.large).cells("writers, "+name), "", "")...)
	w.row("relay, next to nothing waits", total(l.relay.small), l.heaps[0])
	w.row("relay, "+name, total(l.relay.large), l.heaps[1])
	return l, nil
}

func (w *waiting) row(name string, c cost, heap backlog.Memory) {
	w.table.add(append(c.cells(name), bytesText(int64(heap.Heap)), bytesText(int64(heap.Live)))...)
}

// writing returns a function that measures writers of a table for a part of the time.
func (w *waiting) writing(ctx context.Context, o *outboxTable) func() (cost, error) {
	return func() (cost, error) { return w.base.drive(ctx, w.stretch()/rounds, o.write) }
}

// draining returns a function that measures a relay which publishes n messages. It adds messages if fewer wait. In the
// small table all waiting messages are published.
func (w *waiting) draining(ctx context.Context, o *outboxTable, n int64, heap *backlog.Memory) func() (cost, error) {
	return func() (cost, error) {
		waits, err := o.waiting(ctx)
		if err == nil && waits < n {
			err = o.fill(ctx, n)
			waits += n
		}
		if err != nil {
			return cost{}, err
		}
		if o == w.small {
			n = waits
		}
		return w.drain(ctx, o, n, heap)
	}
}

func (w *waiting) drain(ctx context.Context, o *outboxTable, n int64, heap *backlog.Memory) (cost, error) {
	runtime.GC()
	return w.measure(func() (int64, error) {
		done, _, err := backlog.Drain(ctx, o.pool, n, func(int64) { heap.Raise() })
		return done, err
	})
}

// pile fills the large table.
func (w *waiting) pile(ctx context.Context, r *report) error {
	began := time.Now()
	if err := w.large.fill(ctx, w.messages); err != nil {
		return err
	}
	took := time.Since(began).Round(time.Second)
	size, err := number(ctx, w.large.pool, sizeSQL, "holdfast_outbox")
	r.note("%d messages of %d bytes were written by generate_series in %v; the table and its indexes have %s.", w.messages, w.body, took, bytesText(size))
	return err
}

// drainRest publishes all waiting messages of the large table, each once.
func (w *waiting) drainRest(ctx context.Context) (heap backlog.Memory, err error) {
	n, err := w.large.waiting(ctx)
	if err != nil {
		return heap, err
	}
	c, err := w.drain(ctx, w.large, n, &heap)
	if err != nil {
		return heap, err
	}
	if c.ops != n {
		return heap, fmt.Errorf("%d messages were published, %d had waited", c.ops, n)
	}
	w.row("relay, all the rest", c, heap)
	_, err = w.large.pool.Exec(ctx, "VACUUM holdfast_outbox") // as autovacuum would do later
	return heap, err
}

const (
	// heldBytes is the maximum disk space of a minute, because no dead row can be removed.
	heldBytes = 400 << 20
	// heldSlices is the number of rows that the time of the snapshot is divided into.
	heldSlices = 5
	// besideSnapshot is how much more a message may cost while no dead row can be removed. Each claim walks over the dead
	// versions of the sixteen lanes. If claims are slower, more messages wait for the next claim, and there are fewer
	// claims. So the cost rises for some minutes and then falls.
	besideSnapshot = 4
	// keptPace is the minimum part of the pace that must be reached.
	keptPace = 0.9
	// backlogSeconds: messages of this many seconds may wait at the end of a slice.
	backlogSeconds = 5
)

// held is an outbox with writers at an even pace and a relay, while a snapshot is held.
type held struct {
	*base
	sizes
	outbox    *outboxTable
	published atomic.Int64
	rate      float64
	table     table
}

// soakSnapshot measures writers and a relay before, while and after a transaction holds an old snapshot, which keeps
// Postgres from removing dead rows. They run at half of the rate that they reach without it.
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
	// First clean up the backlog, as autovacuum would do within a minute.
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

// startRelay runs a relay in default settings until stop is called.
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

// capacity measures the common rate of writers and relay, and sets half of it as the pace.
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
	for { // drain the waiting messages first
		n, err := h.outbox.waiting(ctx)
		if err != nil || n == 0 {
			return err
		}
		if err := runloop.Sleep(ctx, 100*time.Millisecond); err != nil {
			return err
		}
	}
}

// heldSlice is the result of one slice of the time.
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

// underSnapshot runs slice several times while a transaction with a snapshot stays open.
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
