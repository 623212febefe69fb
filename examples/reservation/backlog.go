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
	// freshFor is how long an answer is told: until the next one has had all the time that it may take.
	freshFor = backlogTimeout + 2*backlogEvery
)

// backlog knows what waits on real servers. All viewers share one look, since each opens a connection to the broker.
// Of a server that does not answer nothing is known soon.
type backlog struct {
	outbox func(context.Context) (driver.Depth, error)
	queue  func(context.Context) (inbox.Stats, error)
	inHand func() int64 // the broker has handed it out, and it is not processed yet

	mu     sync.Mutex
	asked  time.Time
	depth  answer[driver.Depth]
	behind answer[inbox.Stats]
}

// answer is what a server has told, and when.
type answer[T any] struct {
	at   time.Time
	told T
}

func (a answer[T]) fresh() bool { return time.Since(a.at) < freshFor }

// Look returns what was seen last, and nothing of a server that has not answered, or not for freshFor. It does not fail.
func (b *backlog) Look(context.Context) (flow.Backlog, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.asked = time.Now()
	var seen flow.Backlog
	if b.depth.fresh() {
		seen.Outbox = new(inOutbox(b.depth.told))
	}
	if b.behind.fresh() {
		seen.Queue = new(inQueue(b.behind.told) + int(b.inHand()))
	}
	if b.depth.fresh() && b.behind.fresh() {
		seen.Dead = new(dead(b.depth.told, b.behind.told))
	}
	return seen, nil
}

func inOutbox(depth driver.Depth) int { return depth.Ready + depth.Parked }

func inQueue(queue inbox.Stats) int { return queue.Waiting + queue.Retrying + queue.PutOff }

func dead(depth driver.Depth, queue inbox.Stats) int {
	n := depth.Dead
	for _, of := range queue.Dead {
		n += of
	}
	return n
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
	b.depth = answer[driver.Depth]{time.Now(), depth}
}

func (b *backlog) lookAtQueue(ctx context.Context) {
	behind, err := b.queue(ctx)
	if err != nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.behind = answer[inbox.Stats]{time.Now(), behind}
}
