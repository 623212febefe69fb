package main

import (
	"context"
	"fmt"
	"runtime"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/backlog"
)

// memoryBacklog is how many times -messages the long backlog has.
const memoryBacklog = 20

// benchMemory is what a relay holds in memory while it drains, without a broker: the heap that is
// reachable, which must not depend on how much waits in the table.
func benchMemory(ctx context.Context, b *bench) error {
	d, err := newStore(ctx, b)
	if err != nil {
		return err
	}
	backlog := func(n int) contender {
		return contender{fmt.Sprintf("backlog of %d", n), func(ctx context.Context, length time.Duration) (sample, error) {
			if length < b.length { // a warm-up
				return d.heapOver(ctx, max(1, n/memoryBacklog))
			}
			return d.heapOver(ctx, n)
		}}
	}
	short, long := backlog(b.messages), backlog(memoryBacklog*b.messages)
	once := *b
	once.rounds = 1
	r, err := once.measure(ctx, table{
		title:      "outbox, memory of a relay",
		columns:    []column{{name: "heap MiB, most", decimals: 1}, {name: "median", decimals: 1}},
		yardsticks: []string{short.name},
		prepare:    d.reset,
		contenders: []contender{short, long},
	})
	if err != nil {
		return err
	}
	b.atMost(1.25, r.ratio(long.name, short.name), fmt.Sprintf("x the heap over a backlog of %d, %s", b.messages, long.name))
	return nil
}

// heapOver looks at the heap a hundred times while n messages are drained.
func (d *drain) heapOver(ctx context.Context, n int) (sample, error) {
	if err := d.fill(ctx, n, 0); err != nil {
		return nil, err
	}
	var heap []float64
	every := max(1, n/100)
	err := d.relay(ctx, backlog.Confirms{}, n, &stopwatch{}, func(published int) {
		if published%every == 0 {
			var now runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&now)
			heap = append(heap, float64(now.HeapAlloc)/(1<<20))
		}
	})
	s := spreadOf(heap)
	return sample{s.most, s.median}, err
}
