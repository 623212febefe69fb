package inboxredis

import (
	"context"
	"crypto/rand"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox/driver"
)

const (
	maxWindow = 2000
	// maxLeft is how many names of sessions whose end failed are remembered.
	maxLeft = 100
	// runIDBytes tells processes apart.
	runIDBytes = 10
)

// errNotRunning is the failure of what needs Run: retries would not become due.
var errNotRunning = fmt.Errorf("inboxredis: not running: %w", driver.ErrUnavailable)

// source is driver.Source: one consumer of a group.
type source struct {
	group  *group
	chores *chores
	run    string // tells this consumer from others of its name

	running atomic.Bool

	mu       sync.Mutex
	session  *session // nil between sessions
	sessions int
	left     []string // names of sessions that may still hold entries
}

// newSource returns the source of a stream, for a process of some name.
func newSource(g *group, run string) *source {
	s := &source{group: g, run: run}
	s.chores = &chores{group: g, renew: s.renew, soon: make(chan struct{}, 1)}
	return s
}

// newRun returns a name that tells this process from others.
func newRun() string { return rand.Text()[:runIDBytes] }

// Traits implements driver.Source.
func (s *source) Traits() driver.Traits {
	return driver.Traits{System: "redis", MaxWindow: maxWindow, MoveSettles: true, Exclusive: s.group.cfg.Ordered}
}

// Open implements driver.Source. Each session has a name of its own, so that what the client sends
// late, for one that is over, touches nothing.
func (s *source) Open(ctx context.Context) (driver.Session, error) {
	if err := s.releaseLeft(ctx); err != nil {
		return nil, s.group.fault("open a session", err)
	}
	s.mu.Lock()
	s.sessions++
	name := s.group.cfg.Name + "-" + s.run + "-" + strconv.Itoa(s.sessions)
	s.mu.Unlock()
	for _, key := range s.group.keys.read()[:2] { // XGROUP CREATECONSUMER would need memory
		if _, err := within(ctx, s.group, func(ctx context.Context) (*redis.XPending, error) {
			return s.group.client.XPending(ctx, key, s.group.cfg.Group).Result()
		}); err != nil {
			return nil, s.group.fault("open a session", err)
		}
	}
	opened := newSession(s, name)
	s.mu.Lock()
	s.session = opened
	s.mu.Unlock()
	return opened, nil
}

// releaseLeft gives back what sessions hold whose end did not reach the server.
func (s *source) releaseLeft(ctx context.Context) error {
	s.mu.Lock()
	left := slices.Clone(s.left)
	s.mu.Unlock()
	for _, name := range left {
		if err := s.group.leave(ctx, name, leaseToken(s.group.cfg, name)); err != nil {
			return err
		}
		s.mu.Lock()
		s.left = slices.DeleteFunc(s.left, func(l string) bool { return l == name })
		s.mu.Unlock()
	}
	return nil
}

// closed notes the end of a session, and whether it may still hold entries.
func (s *source) closed(name string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.session = nil
	if err == nil || isMissing(err) {
		return
	}
	if s.left = append(s.left, name); len(s.left) > maxLeft {
		s.left = s.left[1:] // others claim what it holds
	}
}

// Run implements driver.Source.
func (s *source) Run(ctx context.Context) {
	s.running.Store(true)
	defer s.running.Store(false)
	s.chores.run(ctx)
}

// Served implements Source of package group: this process holds the lease.
func (s *source) Served() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.session != nil && s.session.reader.owns()
}

// renew tells the server what is in work here.
func (s *source) renew(ctx context.Context) error {
	s.mu.Lock()
	current := s.session
	s.mu.Unlock()
	if current == nil {
		return nil
	}
	return current.renew(ctx)
}

// DeadLetters implements driver.Keeper.
func (s *source) DeadLetters() driver.DeadLetters { return &letters{s.group} }

// Ready implements driver.Source. It writes: a Redis without memory, or without the replicas that it
// wants, answers all other questions.
func (s *source) Ready(ctx context.Context) error {
	if !s.running.Load() {
		return errNotRunning
	}
	_, err := within(ctx, s.group, func(ctx context.Context) (string, error) {
		return s.group.client.Set(ctx, s.group.keys.probe(), "", time.Minute).Result()
	})
	return s.group.fault("write", err)
}

// Move implements driver.Source. Each is one script, which sees whether the entry is still its
// session's, stores the copy and ends the original.
func (s *source) Move(ctx context.Context, moves []driver.Move) []error {
	results := make([]error, len(moves))
	var orders []*order
	soon := false
	for i, m := range moves {
		switch d := m.Delivery.(*delivery); {
		case !s.running.Load():
			results[i] = errNotRunning
		case len(d.session.hand.have([]driver.Delivery{d})) == 0:
			results[i] = stale(1)
		default:
			orders = append(orders, s.group.order(m, &results[i]))
			soon = soon || m.Target == driver.ToLater && m.Delay < dueEvery
		}
	}
	var silent error
	for len(orders) > 0 {
		n := portion(orders)
		if silent == nil {
			silent = s.group.move(ctx, orders[:n])
		}
		if silent != nil { // each more would wait as long
			fail(orders[:n], silent)
		}
		orders = orders[n:]
	}
	if soon {
		s.chores.look()
	}
	return results
}

// isMissing reports whether the stream or the group does not exist.
func isMissing(err error) bool {
	return redis.HasErrorPrefix(err, "NOGROUP") || redis.HasErrorPrefix(err, "UNBLOCKED the stream key no longer exists")
}
