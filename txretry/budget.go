package txretry

import (
	"errors"
	"sync"
	"time"
)

// The retry budget protects a database in trouble. Without it, calls keep coming in while each of them repeats its
// work up to MaxAttempts times.
//
// The usual budgets, such as those of gRPC, Finagle and the AWS SDKs, refuse retries and let every new call through.
// Here it is the other way round. A call that has started keeps its attempts: its caller has waited, the server has
// already worked for it, and with fewer rivals it commits. A new call has cost nothing yet, and its refusal costs the
// server nothing. It has sent nothing, so no outcome is ever lost by a refusal.
//
// Over the budget, a call starts only while no other is in an attempt. It is the probe that shows when the trouble is
// over, as often as the server can answer. Waits between two attempts do not count: otherwise the calls that wait keep
// the database idle. If the Manager has one caller, which makes one call after the other, it is never refused.

const (
	budgetSeconds = 11 // at least 10 whole seconds and the current one
	budgetLeast   = 10 // conflicts that the first refusal needs
)

// errOverBudget is the cause of a LockTimeoutError whose call was not started.
var errOverBudget = errors.New("too many recent attempts needed a retry, and another call is running")

// budget decides which calls may start. It is safe for concurrent use. A nil budget lets all of them start.
type budget struct {
	share float64
	start time.Time

	mu      sync.Mutex
	running int  // calls that have started and do not wait for their next attempt
	over    bool // a call starts only if none is running
	recent  tally
	seconds [budgetSeconds]tally
	second  int64 // the newest one, since start
}

// tally counts attempts that have ended.
type tally struct {
	attempts  int
	conflicts int // of these, failed on a lock or a conflict
}

// newBudget returns nil for a share of 0.
func newBudget(share float64) *budget {
	if share == 0 {
		return nil
	}
	return &budget{share: share, start: time.Now()}
}

// enter reports whether a call may start. The caller must leave at its end, and while it waits between two attempts.
func (b *budget) enter() bool {
	if b == nil {
		return true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.update()
	if b.over && b.running > 0 {
		return false
	}
	b.running++
	return true
}

func (b *budget) leave() {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.running--
}

// rejoin lets a call that has left make another attempt. A started call keeps its attempts.
func (b *budget) rejoin() {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.running++
}

// exceeded reports whether a call starts only while no other runs.
func (b *budget) exceeded() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.update()
	return b.over
}

// count counts an attempt that had a connection.
func (b *budget) count(conflict bool) {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	one := tally{attempts: 1}
	if conflict {
		one.conflicts = 1
	}
	b.forget()
	b.seconds[b.second%budgetSeconds].add(one, 1)
	b.recent.add(one, 1)
	b.update()
}

// update goes over the budget only after several conflicts, because a share of few attempts means little. It stays
// over with fewer: a probe may wait as long as LockTimeout for each of its conflicts.
func (b *budget) update() {
	b.forget()
	exceeded := float64(b.recent.conflicts) > b.share*float64(b.recent.attempts)
	b.over = exceeded && (b.over || b.recent.conflicts >= budgetLeast)
}

// forget drops the attempts that are no longer recent.
func (b *budget) forget() {
	now := int64(time.Since(b.start) / time.Second)
	for range min(now-b.second, budgetSeconds) {
		b.second++
		oldest := &b.seconds[b.second%budgetSeconds]
		b.recent.add(*oldest, -1)
		*oldest = tally{}
	}
	b.second = now
}

func (t *tally) add(u tally, sign int) {
	t.attempts += sign * u.attempts
	t.conflicts += sign * u.conflicts
}
