package main

import (
	"context"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

const (
	// backlogEvery is how often the servers are asked what waits, while somebody looks at the page.
	backlogEvery   = 500 * time.Millisecond
	backlogTimeout = 5 * time.Second
	// looking is for how long after a look somebody is thought to be there.
	looking = 3 * time.Second
)

// backlog knows what waits on real servers. All viewers share one look, since each opens a connection to the broker.
// A server that does not answer leaves what was known of it.
type backlog struct {
	outbox func(context.Context) (driver.Depth, error)
	queue  func(context.Context) (inbox.Stats, error)
	inHand func() int64 // the broker has handed it out, and it is not processed yet

	mu     sync.Mutex
	asked  time.Time
	depth  driver.Depth
	behind inbox.Stats
}

// Look returns what was seen last.
func (b *backlog) Look(context.Context) (flow.Backlog, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.asked = time.Now()
	seen := backlogOf(b.depth, b.behind)
	seen.Queue += int(b.inHand())
	return seen, nil
}

func backlogOf(depth driver.Depth, queue inbox.Stats) flow.Backlog {
	b := flow.Backlog{Outbox: depth.Ready + depth.Parked, Queue: queue.Waiting + queue.Retrying, Dead: depth.Dead}
	for _, n := range queue.Dead {
		b.Dead += n
	}
	return b
}

// Run looks until ctx ends.
func (b *backlog) Run(ctx context.Context) error {
	var looks sync.WaitGroup
	looks.Go(func() { b.repeat(ctx, b.lookAtOutbox) })
	looks.Go(func() { b.repeat(ctx, b.lookAtQueue) })
	looks.Wait()
	return nil
}

// Ready returns nil: no work waits for a view.
func (b *backlog) Ready(context.Context) error { return nil }

func (b *backlog) repeat(ctx context.Context, look func(context.Context)) {
	tick := time.NewTicker(backlogEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if !b.wanted() {
			continue
		}
		attempt, cancel := context.WithTimeout(ctx, backlogTimeout)
		look(attempt)
		cancel()
	}
}

func (b *backlog) wanted() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return time.Since(b.asked) < looking
}

func (b *backlog) lookAtOutbox(ctx context.Context) {
	depth, err := b.outbox(ctx)
	if err != nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.depth = depth
}

func (b *backlog) lookAtQueue(ctx context.Context) {
	behind, err := b.queue(ctx)
	if err != nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.behind = behind
}
