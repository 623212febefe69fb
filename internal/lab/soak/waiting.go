package main

import (
	"context"
	"fmt"
	"runtime"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/backlog"
)

const (
	// messageBytes is what a message takes on disk beside its body: row, indexes and write-ahead log.
	messageBytes = 600
	// leastDrained is how many messages a relay drains at least while it is measured: the clock of processor time ticks
	// every 10 ms.
	leastDrained = 10_000
	// heapSlack is what a heap may grow by chance.
	heapSlack = 4 << 20
)

// waiting compares an outbox in which next to nothing waits with one in which many messages do.
type waiting struct {
	*base
	sizes
	small, large *outboxTable
	table        table
}

// soakWaiting measures writers and a relay beside many messages that wait, has the relay publish them all, and measures
// both again.
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

// stage is what was measured while so much waits.
type stage struct {
	write, relay compared
	heaps        [2]backlog.Memory // small, large
}

// look has writers write, and then a relay drain as many and further messages, on both tables.
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

// writing returns what measures writers of a table for a part of the time.
func (w *waiting) writing(ctx context.Context, o *outboxTable) func() (cost, error) {
	return func() (cost, error) { return w.base.drive(ctx, w.stretch()/rounds, o.write) }
}

// draining returns what measures a relay that publishes n messages. They are added where fewer wait, and
// what waits beside them in the small table is published, too.
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

// drainRest has a relay publish all that waits in the large table: each message once.
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
	_, err = w.large.pool.Exec(ctx, "VACUUM holdfast_outbox") // as autovacuum does in its time
	return heap, err
}
