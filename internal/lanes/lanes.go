// Package lanes lets calls to a server share its round trips. While few are
// under way, each goes at once. What is asked while all lanes are taken travels
// together in the next trip: for a server and a client that are busy, the trips
// cost more than what they carry.
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
	maxQueue = 10_000 // calls that wait; beyond, callers are refused at once
)

var (
	// ErrCrowded refuses a caller because too many wait already.
	ErrCrowded = errors.New("too many callers wait")
	// ErrTimeout says that a caller who shared a trip has no answer in time.
	ErrTimeout = errors.New("no answer in time")
)

// Lanes carries calls of type C, a pointer most often. Its fields are set before
// the first call; the zero value of the others is ready. It is safe for
// concurrent use.
type Lanes[C any] struct {
	// Send makes one trip and leaves the replies in the calls.
	Send func(ctx context.Context, batch []C)
	// Most is how many trips may be under way at once, at least 1.
	Most int
	// Timeout bounds a trip, and how long a caller waits for others.
	Timeout time.Duration
	// OwnTrips lets a caller who finds a free lane make the trip itself, which
	// spares a goroutine, a timer and two wake-ups. The caller is then held for as
	// long as Send takes, whatever its context says.
	OwnTrips bool

	mu     sync.Mutex
	active int
	queue  []*waiter[C]
}

// waiter is a call that travels with others.
type waiter[C any] struct {
	call C
	done chan struct{}
	gone atomic.Bool // nobody waits any more: do not send it
}

// Do has c answered. With an error (of ctx, ErrTimeout, ErrCrowded) there is no
// reply, and c must not be looked at: it may be on its way.
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

// Load returns how many trips are under way and how many calls wait for one.
func (l *Lanes[C]) Load() (active, waiting int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.active, len(l.queue)
}

// enter queues the call, or returns nil: the caller has a lane and makes the
// trip.
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

// leave gives the caller's lane to those who wait.
func (l *Lanes[C]) leave(ctx context.Context) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.queue) > 0 {
		go l.serve(context.WithoutCancel(ctx))
		return
	}
	l.active--
}

// serve sends what is queued until nothing is. A trip that ignores its timeout keeps
// its goroutine, but not the lane: nobody waits for it any more.
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

// next takes a batch from the queue. If there is none, the lane is free again.
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
