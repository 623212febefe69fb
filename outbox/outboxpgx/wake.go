package outboxpgx

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/internal/pgnotify"
)

const (
	// channelPrefix is the prefix of a table's notification channel.
	channelPrefix = "holdfast_outbox_"
	// sendInterval is the minimum time between two notifications; commits in between share one. Postgres commits
	// transactions with a NOTIFY one at a time.
	sendInterval = 2 * time.Millisecond
	// sendFor is how long a failed notification is retried.
	sendFor = 10 * time.Second
	// probeInterval is the time between two tests of the listening connection. A dead connection is replaced
	// within twice this time and 3 s.
	probeInterval = 5 * time.Second
)

// connect creates the sender and the listener of notifications. Neither does anything yet.
func (s *Store) connect() {
	s.relays.first = make(chan struct{}, 1)
	channel := pgnotify.Channel{Pool: s.pool, Prefix: channelPrefix, Table: s.t.outbox}
	s.sender = pgnotify.NewSender(pgnotify.SenderConfig{
		Channel: channel, Interval: sendInterval, Keep: sendFor,
		Failed: func(ctx context.Context, err error) {
			s.cfg.Logger.WarnContext(ctx, "outboxpgx: could not notify other processes", slog.Any("error", err))
		},
	})
	s.listener = pgnotify.NewListener(pgnotify.ListenerConfig{
		Channel: channel, ProbeInterval: probeInterval,
		Wake: func(time.Time) { s.relays.wake() },
		Failed: func(ctx context.Context, err error) {
			s.cfg.Logger.WarnContext(ctx, "outboxpgx: not receiving notifications; polling only", slog.Any("error", err))
		},
	})
}

// Wake makes a relay poll now, after messages were committed. It prefers a relay of this process on this Store. If
// none of them polls, it notifies other processes. Write does this by itself after the commit of a txretry
// transaction. Wake does not block.
func (s *Store) Wake() {
	if s.relays.wake() || s.cfg.PollOnly {
		return
	}
	s.sender.Tell(time.Time{})
}

// Background implements driver.Background. Until ctx ends, it wakes the relay for commits in this process and in
// others, and prunes. If several relays run on one Store, one of them listens and prunes for all.
func (s *Store) Background(ctx context.Context, wake func() bool) {
	defer s.relays.join(wake)()
	wake() // for commits of this process since the relay's first poll
	s.relays.whileFirst(ctx, func(ctx context.Context) {
		var running sync.WaitGroup
		defer running.Wait()
		running.Go(func() { s.pruner.Run(ctx) })
		if !s.cfg.PollOnly {
			running.Go(func() { s.listener.Run(ctx) })
		}
	})
	<-ctx.Done()
}

// Hears implements driver.Hearing.
func (s *Store) Hears() bool { return !s.cfg.PollOnly && s.listener.State() == nil }

// checkWakeUps tests on a separate connection whether notifications arrive.
func (s *Store) checkWakeUps(ctx context.Context, found *check.Findings) error {
	if s.cfg.PollOnly {
		return nil
	}
	err := s.listener.Probe(ctx)
	if errors.Is(err, pgnotify.ErrSwallowed) {
		found.Add("give the relay's Store a pool that reaches Postgres itself or a pooler in session mode, or set Config.PollOnly",
			"notifications do not arrive, so relays find messages of other processes only when they poll")
		return nil
	}
	return err
}

// relays are the relays of this process that run on one Store.
type relays struct {
	mu   sync.Mutex
	list []*relay

	first chan struct{} // holds a value while one of them listens and prunes for all
}

type relay struct{ wake func() bool }

// join adds a relay until leave is called.
func (r *relays) join(wake func() bool) (leave func()) {
	joined := &relay{wake}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.list = append(slices.Clone(r.list), joined)
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.list = slices.DeleteFunc(slices.Clone(r.list), func(other *relay) bool { return other == joined })
	}
}

// wake calls the relays in turn until one will poll. It returns false if none will.
func (r *relays) wake() bool {
	r.mu.Lock()
	list := r.list // never changed in place
	r.mu.Unlock()
	return slices.ContainsFunc(list, func(relay *relay) bool { return relay.wake() })
}

// whileFirst waits until no other relay does the work, and then does it.
func (r *relays) whileFirst(ctx context.Context, work func(context.Context)) {
	select {
	case r.first <- struct{}{}:
		defer func() { <-r.first }()
		work(ctx)
	case <-ctx.Done():
	}
}
