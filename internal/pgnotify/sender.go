package pgnotify

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/internal/backoff"
	"github.com/holdfast-go/holdfast/internal/telemetry"
)

// SenderConfig tunes a Sender.
type SenderConfig struct {
	Channel Channel
	// Interval is the least time between two notifications.
	Interval time.Duration
	// Keep is how long a notification that cannot be sent is tried again. Default: it
	// is dropped.
	Keep time.Duration
	// Failed is called now and then when a notification was not sent.
	Failed func(ctx context.Context, err error)
}

// Sender sends notifications, each with the earliest of the times that Tell was
// given since the last one. It needs no Run: its one goroutine lives from a call of
// Tell until an Interval has passed without a further one.
type Sender struct {
	cfg        SenderConfig
	complaints telemetry.Seldom

	mu      sync.Mutex
	running bool
	pending bool
	at      time.Time
}

// NewSender returns a Sender.
func NewSender(cfg SenderConfig) *Sender { return &Sender{cfg: cfg} }

// Tell asks for a notification about a time, or an unknown one if at is zero. It
// never blocks, and is safe for concurrent use.
func (s *Sender) Tell(at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.add(at)
	if !s.running {
		s.running = true
		go s.run()
	}
}

// add notes a time; s.mu is held.
func (s *Sender) add(at time.Time) {
	if !s.pending || at.Before(s.at) {
		s.pending, s.at = true, at
	}
}

// take returns what is to be sent. If that is nothing, the goroutine ends.
func (s *Sender) take() (at time.Time, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	at, ok = s.at, s.pending
	s.pending, s.running = false, ok
	return at, ok
}

func (s *Sender) run() {
	var since time.Time // when sending began to fail
	failures := 0
	between := backoff.Policy{Base: 50 * time.Millisecond, Max: maxPause, Jitter: 0.5}
	for {
		at, ok := s.take()
		if !ok {
			return
		}
		begun := time.Now()
		pause := s.cfg.Interval
		err := s.cfg.Channel.notify(context.Background(), payload(at))
		switch {
		case err == nil || isClosed(err): // nobody waits for word of a process that ends
			failures = 0
		default:
			s.complain(err)
			if failures == 0 {
				since = begun
			}
			if time.Since(since) < s.cfg.Keep {
				s.keep(at)
			}
			pause = max(pause, between.Delay(failures, rand.Float64()))
			failures++
		}
		time.Sleep(pause - time.Since(begun))
	}
}

// keep has a time sent again, unless an earlier one has come meanwhile.
func (s *Sender) keep(at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.add(at)
}

func (s *Sender) complain(err error) {
	if _, ok := s.complaints.Due(); ok {
		s.cfg.Failed(context.Background(), err)
	}
}

// isClosed recognises the errors of a pool that was closed: before the call, from a
// package that is no dependency of ours, or while it connected. The call's own context
// is never cancelled.
func isClosed(err error) bool {
	return errors.Is(err, context.Canceled) || strings.Contains(err.Error(), "closed pool")
}
