package inboxredis

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

const (
	maxWindow = 2000
	// maxLeft is the number of remembered sessions whose close failed.
	maxLeft = 100
	// runIDBytes is the length of a name that distinguishes processes.
	runIDBytes = 10
)

// errNotRunning is the error of calls that need Run, because without it retries do not become due.
var errNotRunning = fmt.Errorf("inboxredis: not running: %w", driver.ErrUnavailable)

// source implements driver.Source: one consumer of a group.
type source struct {
	group  *group
	chores *chores
	run    string // distinguishes this consumer from others with its name

	running atomic.Bool

	mu       sync.Mutex
	session  *session // nil between sessions
	sessions int
	left     []string // names of sessions that may still hold entries
}

// newSource returns the source of a stream, for a process with the given name.
func newSource(g *group, run string) *source {
	s := &source{group: g, run: run}
	s.chores = &chores{group: g, renew: s.renew, soon: make(chan struct{}, 1)}
	return s
}

// newRun returns a name that distinguishes this process from others.
func newRun() string { return rand.Text()[:runIDBytes] }

// Traits implements driver.Source.
func (s *source) Traits() driver.Traits {
	return driver.Traits{System: "redis", MaxWindow: maxWindow, MoveSettles: true, Exclusive: s.group.cfg.Ordered}
}

// Open implements driver.Source. Each session has its own name, so that late commands of a closed session change
// nothing.
func (s *source) Open(ctx context.Context) (driver.Session, error) {
	if err := s.releaseLeft(ctx); err != nil {
		return nil, s.group.fault("open a session", err)
	}
	s.mu.Lock()
	s.sessions++
	name := s.group.cfg.ConsumerConfig.Name + "-" + s.run + "-" + strconv.Itoa(s.sessions)
	s.mu.Unlock()
	for _, key := range s.group.keys.read()[:2] { // XGROUP CREATECONSUMER would need memory
		if _, err := within(ctx, s.group, func(ctx context.Context) (*redis.XPending, error) {
			return s.group.client.XPending(ctx, key, s.group.cfg.ConsumerConfig.Name).Result()
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

// releaseLeft requeues the entries of sessions whose close did not reach the server.
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

// closed records the end of a session, and whether it may still hold entries.
func (s *source) closed(name string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.session = nil
	if err == nil || isMissing(err) {
		return
	}
	if s.left = append(s.left, name); len(s.left) > maxLeft {
		s.left = s.left[1:] // others claim its entries
	}
}

// Run implements driver.Source.
func (s *source) Run(ctx context.Context) {
	s.running.Store(true)
	defer s.running.Store(false)
	s.chores.run(ctx)
}

// Served implements Source of package group: it reports whether this process holds the lease.
func (s *source) Served() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.session != nil && s.session.reader.owns()
}

// renew renews the entries in flight.
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

// Ready implements driver.Source. It writes, because a Redis without memory, or without the required replicas,
// still answers reads.
func (s *source) Ready(ctx context.Context) error {
	if !s.running.Load() {
		return errNotRunning
	}
	_, err := within(ctx, s.group, func(ctx context.Context) (string, error) {
		return s.group.client.Set(ctx, s.group.keys.probe(), "", time.Minute).Result()
	})
	return s.group.fault("write", err)
}

// Move implements driver.Source. Each move is one script, which checks that the session still owns the entry,
// stores the copy and ends the original.
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
		if silent != nil { // each further one would wait as long
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

// Backlog implements driver.Measured. Requeued messages count as waiting, like messages that were never read.
func (s *source) Backlog(ctx context.Context) (b driver.Backlog, err error) {
	g := s.group
	for _, stream := range g.keys.read()[:2] {
		n, err := g.waiting(ctx, stream)
		if err != nil {
			return b, g.fault("count messages", err)
		}
		b.Waiting += n
	}
	for putOff, sum := range map[bool]*int{false: &b.Retrying, true: &b.PutOff} {
		n, err := within(ctx, g, func(ctx context.Context) (int64, error) { return g.client.ZCard(ctx, g.keys.waiting(putOff)).Result() })
		if err != nil {
			return b, g.fault("count waiting messages", err)
		}
		*sum = int(n)
	}
	return b, nil
}

// waiting counts the entries of a stream that no consumer of the group has. It returns 0 if the stream or the
// group does not exist.
func (g *group) waiting(ctx context.Context, stream string) (int, error) {
	groups, err := within(ctx, g, func(ctx context.Context) ([]redis.XInfoGroup, error) {
		return g.client.XInfoGroups(ctx, stream).Result()
	})
	if redis.HasErrorPrefix(err, "ERR no such key") {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	for _, info := range groups {
		if info.Name != g.cfg.ConsumerConfig.Name {
			continue
		}
		if info.Lag < 0 { // the server does not know
			n, err := within(ctx, g, func(ctx context.Context) (int64, error) { return g.client.XLen(ctx, stream).Result() })
			return int(n), err
		}
		given, err := g.givenBack(ctx, stream)
		return int(info.Lag) + given, err
	}
	return 0, nil
}

// givenBack counts requeued entries that wait to be claimed.
func (g *group) givenBack(ctx context.Context, stream string) (int, error) {
	consumers, err := within(ctx, g, func(ctx context.Context) ([]redis.XInfoConsumer, error) {
		return g.client.XInfoConsumers(ctx, stream, g.cfg.ConsumerConfig.Name).Result()
	})
	for _, c := range consumers {
		if c.Name == returned {
			return int(c.Pending), err
		}
	}
	return 0, err
}

// Stats counts the messages of the stream or its partitions, their retries and dead letters. Run need not be
// running.
func (c *Consumer) Stats(ctx context.Context) (inbox.Stats, error) { return c.engine.Stats(ctx) }

const (
	// renewEvery is the interval at which entries in flight are renewed.
	renewEvery = 2 * time.Second
	// claimIdle is the time without renewal after which others may claim an entry, and a lease expires.
	claimIdle = 8 * time.Second
	// dueEvery bounds the delay of a retry beyond its due time.
	dueEvery = time.Second
	// dueAtOnce is the number of retries that one script moves to their stream.
	dueAtOnce   = 20
	trimEvery   = 10 * time.Second
	forgetEvery = 5 * time.Minute
	forgetAfter = time.Hour
)

// chores does the periodic work of a group besides its sessions. Each process does it.
type chores struct {
	group *group
	renew func(context.Context) error
	soon  chan struct{} // a retry may be due before the next run
}

func (c *chores) run(ctx context.Context) {
	var all sync.WaitGroup
	defer all.Wait()
	all.Go(func() { c.every(ctx, renewEvery, "renew entries in flight", c.renew) })
	all.Go(func() { c.promote(ctx) })
	all.Go(func() { c.every(ctx, forgetEvery, "inbox: could not remove names of dead consumers", c.forget) })
	all.Go(func() { c.every(ctx, trimEvery, "inbox: could not trim stream", c.trim) })
}

// every runs work at intervals.
func (c *chores) every(ctx context.Context, interval time.Duration, message string, work func(context.Context) error) {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	failing := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			failing = c.report(ctx, failing, message, work(ctx))
		}
	}
}

// report logs an error unless the previous run failed too. It returns whether there is an error.
func (c *chores) report(ctx context.Context, failing bool, message string, err error) bool {
	if err != nil && ctx.Err() == nil && !failing {
		c.group.log.WarnContext(ctx, message, slog.Any("error", err))
	}
	return err != nil
}

// trim removes entries that all groups have processed.
func (c *chores) trim(ctx context.Context) error {
	err := c.trimOne(ctx, c.group.keys.retries())
	if c.group.cfg.KeepProcessed {
		return err
	}
	return errors.Join(err, c.trimOne(ctx, c.group.keys.stream))
}

// trimOne calls the script until there is nothing left to remove. With one call per interval a busy stream would
// grow without end.
func (c *chores) trimOne(ctx context.Context, key string) error {
	for ctx.Err() == nil {
		if removed, err := c.group.script(ctx, trimScript, []string{key}); err != nil || removed == 0 {
			return err
		}
	}
	return nil
}

// forget removes the names of dead consumers.
func (c *chores) forget(ctx context.Context) error {
	return c.forgetIdle(ctx, forgetAfter)
}

func (c *chores) forgetIdle(ctx context.Context, idle time.Duration) error {
	var errs []error
	for _, key := range c.group.keys.read()[:2] {
		_, err := c.group.script(ctx, forgetScript, []string{key}, c.group.cfg.ConsumerConfig.Name, idle.Milliseconds())
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// promote moves due retries to their stream.
func (c *chores) promote(ctx context.Context) {
	failing := false
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.soon:
		case <-timer.C:
		}
		next, err := c.due(ctx)
		failing = c.report(ctx, failing, "inbox: could not deliver due retries", err)
		timer.Reset(next)
	}
}

// due moves retries to their stream, and returns when to run again.
func (c *chores) due(ctx context.Context) (time.Duration, error) {
	next := dueEvery
	for _, putOff := range []bool{false, true} {
		keys := []string{c.group.keys.waiting(putOff), c.group.keys.retries()}
		millis, err := c.group.script(ctx, dueScript, keys, dueAtOnce)
		if err != nil {
			return dueEvery, err
		}
		if millis >= 0 {
			next = min(next, time.Duration(millis)*time.Millisecond)
		}
	}
	return next, nil
}

// look makes promote run at once.
func (c *chores) look() {
	select {
	case c.soon <- struct{}{}:
	default: // promote will run anyway
	}
}
