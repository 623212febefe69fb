package engine

import (
	"context"
	"sync/atomic"
	"time"
)

// condition is what readiness goes by. The loop compares it in every turn.
type condition struct {
	paused, draining, session bool
	halted                    bool
	ends                      int // of sessions
	stuck                     int // handlers that ignore the end of their time
	full                      bool
	place                     string    // that takes no failed messages,
	until                     time.Time // which counts until then
}

// readiness is a condition in words.
type readiness struct {
	err     error
	refused error
	until   time.Time
}

// status shows others whether a consumer is ready.
type status struct {
	cfg   *settings
	last  condition
	shown atomic.Pointer[readiness]
}

// show shows a condition, if it has changed. Session is why there is none, pause why the consumer is paused, and
// refused why a place takes nothing.
func (s *status) show(c condition, session, pause, refused error) {
	if s.last == c && s.shown.Load() != nil {
		return
	}
	s.last = c
	r := &readiness{}
	switch {
	case c.draining:
		r.err = s.cfg.errorf("draining")
	case c.halted: // by an operator, who knows: it could work
	case !c.session && session != nil:
		r.err = s.cfg.errorf("no session with the broker: %w", session)
	case !c.session:
		r.err = s.cfg.errorf("no session with the broker")
	case c.paused && pause != nil:
		r.err = s.cfg.errorf("paused: a server that processing needs is unavailable: %w", pause)
	case c.paused:
		r.err = s.cfg.errorf("paused: a server that processing needs is unavailable")
	case c.stuck > 0:
		r.err = s.cfg.errorf("%d handlers do not return although their time is over", c.stuck)
	case c.full && c.place != "":
		r.err = s.cfg.errorf("messages that wait fill the window: %s takes none: %w", c.place, refused)
	case c.full:
		r.err = s.cfg.errorf("failed messages that wait fill the window")
	}
	if c.place != "" {
		r.refused, r.until = s.cfg.errorf("%s takes no messages: %w", c.place, refused), c.until
	}
	s.shown.Store(r)
}

// update shows how a loop's things are.
func (s *status) update(l *loop) {
	c := condition{
		paused: l.pause.on(), draining: l.drain.on, session: l.control.started, ends: l.control.ends,
		halted: l.pause.halted && l.pause.told,
		stuck:  l.overruns.stuck, full: l.control.full(),
	}
	var err error
	c.place, c.until, err = l.moves.refusals.latest()
	s.show(c, l.control.err, l.pause.cause, err)
	l.signals.inHand.Store(int64(l.hand.all.n))
	l.signals.waiting.Store(int64(l.hand.crowd.n))
}

// ready returns why a consumer is not ready.
func (s *status) ready(ctx context.Context, source func(context.Context) error) error {
	r := s.shown.Load()
	switch {
	case r == nil:
		return s.cfg.errorf("no session with the broker")
	case r.err != nil:
		return r.err
	}
	if err := source(ctx); err != nil {
		return s.cfg.errorf("moving failed messages: %w", err)
	}
	if r.refused != nil && time.Now().Before(r.until) {
		return r.refused
	}
	return nil
}
