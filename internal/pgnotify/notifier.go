package pgnotify

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/internal/backoff"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/telemetry"
)

// NotifierConfig tunes a Notifier. All fields are required.
type NotifierConfig struct {
	Channel  Channel
	Interval time.Duration                        // the least time between two notifications
	Failed   func(ctx context.Context, err error) // called now and then when a notification was not sent
}

// Notifier sends notifications, each with the earliest of the times that were
// asked for since the last one.
type Notifier struct {
	cfg  NotifierConfig
	ring chan struct{}

	mu      sync.Mutex
	pending bool
	at      time.Time
}

// NewNotifier returns a Notifier; Run sets it to work.
func NewNotifier(cfg NotifierConfig) *Notifier {
	return &Notifier{cfg: cfg, ring: make(chan struct{}, 1)}
}

// Notify asks for a notification about a time, or an unknown one if at is zero. It
// never blocks, and is safe for concurrent use.
func (n *Notifier) Notify(at time.Time) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.pending || at.Before(n.at) {
		n.pending, n.at = true, at
	}
	select {
	case n.ring <- struct{}{}:
	default:
	}
}

// Run sends notifications until ctx is cancelled, one that was asked for before
// that included.
func (n *Notifier) Run(ctx context.Context) {
	work, cancel := runloop.Detach(ctx, timeout)
	defer cancel()
	between := backoff.Policy{Base: 50 * time.Millisecond, Max: maxPause, Jitter: 0.5}
	failures := 0
	var complaints telemetry.Seldom
	for {
		at, ok := n.next(ctx)
		if !ok {
			return
		}
		pause := n.cfg.Interval
		if err := n.cfg.Channel.notify(work, payload(at)); err != nil {
			if _, ok := complaints.Due(); ok {
				n.cfg.Failed(ctx, err)
			}
			pause = max(pause, between.Delay(failures, rand.Float64()))
			failures++
			n.Notify(at)
		} else {
			failures = 0
		}
		if runloop.Sleep(ctx, pause) != nil && failures > 0 {
			return
		}
	}
}

// next waits until a notification is asked for. It returns false when none is and
// ctx has ended.
func (n *Notifier) next(ctx context.Context) (at time.Time, ok bool) {
	for {
		if at, ok := n.take(); ok {
			return at, true
		}
		select {
		case <-n.ring:
		case <-ctx.Done():
			return n.take()
		}
	}
}

func (n *Notifier) take() (at time.Time, ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	at, ok = n.at, n.pending
	n.pending = false
	return at, ok
}
