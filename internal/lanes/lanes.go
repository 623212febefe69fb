// Package lanes combines calls to a server into shared round trips. While few trips run, each call
// goes at once. Calls that come while all lanes are taken travel together in the next trip. For a
// busy server and client, a trip costs more than its calls.
package lanes

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

const (
	maxBatch = 128    // calls in one trip: Redis takes about a millisecond for as many scripts
	maxQueue = 10_000 // calls that wait; beyond this, calls are rejected at once
)

var (
	// ErrCrowded rejects a call because too many wait already.
	ErrCrowded = errors.New("too many callers wait")
	// ErrTimeout means that a call on a shared trip got no answer in time.
	ErrTimeout = errors.New("no answer in time")
)

// Lanes carries calls of type C, usually a pointer. Set its exported fields before the first call.
// It is safe for concurrent use.
type Lanes[C any] struct {
	// Send makes one trip and stores the replies in the calls.
	Send func(ctx context.Context, batch []C)
	// Most is the maximum number of concurrent trips, at least 1.
	Most int
	// Timeout bounds a trip, and the wait of a call on a shared trip.
	Timeout time.Duration
	// OwnTrips lets a caller that finds a free lane make the trip itself, which saves a goroutine,
	// a timer and two wake-ups. The caller then blocks as long as Send does, even if its context
	// ends.
	OwnTrips bool

	mu     sync.Mutex
	active int
	queue  []*waiter[C]
}

// waiter is a call on a shared trip.
type waiter[C any] struct {
	call C
	done chan struct{}
	gone atomic.Bool // the caller gave up: do not send it
}

// Do gets c answered. With an error (of ctx, ErrTimeout or ErrCrowded) there is no reply, and the
// caller must not read c: it may be on its way.
func (l *Lanes[C]) Do(ctx context.Context, c C) error {
	w, err := l.enter(ctx, c)
	if err != nil {
		return err
	}
	if w == nil {
		defer l.leave(ctx)
		l.trip(ctx, []C{c})
		return nil
	}
	timer := time.NewTimer(l.Timeout)
	defer timer.Stop()
	select {
	case <-w.done:
		return nil
	case <-ctx.Done():
		err = ctx.Err()
	case <-timer.C:
		err = ErrTimeout
	}
	w.gone.Store(true)
	return err
}

// Load returns how many trips run and how many calls wait for one.
func (l *Lanes[C]) Load() (active, waiting int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.active, len(l.queue)
}

// enter queues the call, or returns nil: then the caller has a lane and makes the trip.
func (l *Lanes[C]) enter(ctx context.Context, c C) (*waiter[C], error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.queue) >= maxQueue {
		return nil, ErrCrowded
	}
	free := l.active < l.Most
	if free {
		l.active++
		if l.OwnTrips && len(l.queue) == 0 {
			return nil, nil
		}
	}
	w := &waiter[C]{call: c, done: make(chan struct{})}
	l.queue = append(l.queue, w)
	if free {
		go l.serve(context.WithoutCancel(ctx))
	}
	return w, nil
}

// leave passes the caller's lane to waiting calls.
func (l *Lanes[C]) leave(ctx context.Context) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.queue) > 0 {
		go l.serve(context.WithoutCancel(ctx))
		return
	}
	l.active--
}

// serve sends queued calls until the queue is empty. A trip that ignores its timeout keeps its
// goroutine, but not the lane, because no caller waits for it.
func (l *Lanes[C]) serve(ctx context.Context) {
	for batch := l.next(); batch != nil; batch = l.next() {
		calls := make([]C, len(batch))
		for i, w := range batch {
			calls[i] = w.call
		}
		overdue := time.AfterFunc(l.Timeout, func() { l.serve(ctx) })
		l.trip(ctx, calls)
		if !overdue.Stop() {
			return
		}
		for _, w := range batch {
			close(w.done)
		}
	}
}

// next takes a batch from the queue. If the queue is empty, it frees the lane.
func (l *Lanes[C]) next() (batch []*waiter[C]) {
	l.mu.Lock()
	defer l.mu.Unlock()
	taken := 0
	for _, w := range l.queue {
		if len(batch) == maxBatch {
			break
		}
		taken++
		if !w.gone.Load() {
			batch = append(batch, w)
		}
	}
	if l.queue = l.queue[taken:]; len(l.queue) == 0 {
		l.queue = nil
	}
	if batch == nil {
		l.active--
	}
	return batch
}

func (l *Lanes[C]) trip(ctx context.Context, calls []C) {
	if end, ok := ctx.Deadline(); !ok || time.Until(end) > l.Timeout {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, l.Timeout)
		defer cancel()
	}
	l.Send(ctx, calls)
}
