package txretry

import (
	"context"
	"slices"
	"sync"

	"github.com/holdfast-go/holdfast/txretry/driver"
)

// turns lets the callers of one key pass one at a time, first come first
// served, before any of them takes a connection. A hot row then costs a queue
// instead of a storm of serialization failures. It orders the callers of one
// process only; between processes the database still decides.
type turns struct {
	mu       sync.Mutex
	lines    map[string][]*turn // who waits; present while somebody holds the key
	arrivals uint64
}

// turn is a caller's place in a line.
type turn struct {
	call    *call
	ctx     context.Context
	arrival uint64     // its number, over all lines
	granted chan grant // 1

	// A follower is granted a session, runs its fn, reports its part, and waits until that is settled; see group.
	part    chan part         // 1: how its part ended
	ended   part              // the same, as the leader has received it
	settled chan groupOutcome // 1
}

// grant ends a wait in line. The zero value gives the caller the key, which it must pass on. One with a
// session has the caller follow the one that holds the key.
type grant struct {
	session driver.Session
	pending *pending // of the transaction
}

// enter puts a caller in line; wait must follow.
func (t *turns) enter(ctx context.Context, c *call) *turn {
	own := &turn{call: c, ctx: ctx, granted: make(chan grant, 1)}
	if c.opts.Combine > 1 {
		own.part, own.settled = make(chan part, 1), make(chan groupOutcome, 1)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.arrivals++
	own.arrival = t.arrivals
	waiting, taken := t.lines[c.opts.SerialKey]
	if taken {
		t.lines[c.opts.SerialKey] = append(waiting, own)
		return own
	}
	if t.lines == nil {
		t.lines = make(map[string][]*turn)
	}
	t.lines[c.opts.SerialKey] = nil
	own.granted <- grant{}
	return own
}

// wait returns what the caller is granted, or that it has left the line because its context has ended.
func (t *turns) wait(own *turn) (got grant, left bool) {
	select {
	case got = <-own.granted:
		return got, false
	case <-own.ctx.Done():
		if t.leave(own) {
			return grant{}, true
		}
		return <-own.granted, false // at that very moment
	}
}

// leave takes a caller out of line, unless it is there no longer.
func (t *turns) leave(own *turn) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	key := own.call.opts.SerialKey
	i := slices.Index(t.lines[key], own)
	if i >= 0 {
		t.lines[key] = slices.Delete(t.lines[key], i, i+1)
	}
	return i >= 0
}

// abandon is for a caller in line that cannot wait any longer. What it is granted meanwhile it passes on.
func (t *turns) abandon(own *turn) {
	if t.leave(own) {
		return
	}
	if got := <-own.granted; got.session != nil {
		own.part <- partSkipped
		return
	}
	t.pass(own.call.opts.SerialKey)
}

// pass gives the key to the next in line, or frees it.
func (t *turns) pass(key string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	waiting := t.lines[key]
	if len(waiting) == 0 {
		delete(t.lines, key)
		return
	}
	t.lines[key] = waiting[1:]
	waiting[0].granted <- grant{}
}

// arrived returns the number of the latest arrival.
func (t *turns) arrived() uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.arrivals
}

// take takes the next in line out, if it is accepted.
func (t *turns) take(key string, accepted func(next *turn) bool) *turn {
	t.mu.Lock()
	defer t.mu.Unlock()
	waiting := t.lines[key]
	if len(waiting) == 0 || !accepted(waiting[0]) {
		return nil
	}
	t.lines[key] = waiting[1:]
	return waiting[0]
}

// putBack has followers stand first in line again, except one that has gone.
func (t *turns) putBack(key string, followers []*turn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	line := slices.Concat(followers, t.lines[key])
	t.lines[key] = slices.DeleteFunc(line, func(f *turn) bool { return f.ended == partGone })
}
