package engine

import (
	"context"
	"errors"
	"log/slog"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/backoff"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/telemetry"
)

// stable is how long a session must last for its end to count as the first failure again.
const stable = time.Second

// pauses between two sessions: 0.1 s growing to 2 s, spread by half. A pause outlives the fault that
// has caused it, so it is short.
var pauses = backoff.Policy{Base: 100 * time.Millisecond, Max: 2 * time.Second, Jitter: 0.5, JitterAfterCap: true}

// session is one of the source's. Deliveries know theirs, so that nothing of an old one is settled
// on a new one.
type session struct {
	driver.Session
	began time.Time
	over  atomic.Bool // nothing of it can be settled any more
	ended bool        // the loop knows
}

// wish is what the loop wants of the receiver. It holds until the next one, which ends ctx.
type wish struct {
	wants  want
	window int
	serial int // tells wishes for the same window apart: the later one counts anew
	ctx    context.Context
}

type want uint8

const (
	listen want = iota + 1 // receive messages
	stop                   // receive none
	rest                   // receive none, and keep what is on its way: ordered consumers give back all at once
	renew                  // end this session in favour of the next
	leave                  // end it for good
)

// receiver opens sessions and receives messages, one session after the other.
type receiver struct {
	cfg     *settings
	source  driver.Source
	signals *signals
	wishes  chan wish
	post    func(event)
	ctx     context.Context // ends with the run
	seldom  telemetry.Seldom
	failed  int
}

// run serves wishes until there is one to leave.
func (r *receiver) run() {
	w := <-r.wishes
	for w.wants != leave {
		switch {
		case w.ctx.Err() != nil:
			w = <-r.wishes
		case w.wants != listen: // there is no session
			r.post(event{kind: stopped, serial: w.serial})
			w = <-r.wishes
		default:
			w = r.session(w)
		}
	}
	r.post(event{kind: left})
}

// session serves wishes on one session, and returns the one that holds at its end.
func (r *receiver) session(w wish) wish {
	opened, err := r.source.Open(w.ctx)
	if err != nil {
		r.lost(w, nil, err)
		return w
	}
	s := &session{Session: opened, began: time.Now()}
	r.post(event{kind: begun, session: s})
	listening := false
	for {
		if w.wants == renew || w.wants == leave {
			r.close(s, nil)
			return w
		}
		if listening && w.wants != rest {
			if err := s.Stop(r.ctx); err != nil {
				r.lost(w, s, err)
				return w
			}
			listening = false
		}
		if w.wants == stop {
			r.post(event{kind: stopped, session: s, serial: w.serial})
		}
		if w.wants == listen && w.ctx.Err() == nil {
			listening = true
			if err := r.listen(s, w); err != nil {
				r.lost(w, s, err)
				return w
			}
		}
		w = <-r.wishes
	}
}

// listen receives messages until there is another wish, or an error ends the session.
func (r *receiver) listen(s *session, w wish) error {
	if err := s.Start(r.ctx, w.window); err != nil {
		return err
	}
	r.post(event{kind: started, session: s, serial: w.serial})
	o := newOpener(r, s, w.ctx)
	defer o.running.Wait()
	for w.ctx.Err() == nil {
		ds, err := s.Receive(w.ctx, w.window)
		if len(ds) > 0 {
			if items := o.take(ds); len(items) > 0 {
				r.post(event{kind: arrived, session: s, items: items})
			}
		}
		if err != nil && w.ctx.Err() == nil {
			return err
		}
	}
	return nil
}

// item makes an item of a delivery.
func (r *receiver) item(s *session, d driver.Delivery, now time.Time) item {
	m := d.Message()
	if m.FirstFailedAt.After(now) { // a sender's, or another clock's: its age would never end the retries
		m.FirstFailedAt = time.Time{}
	}
	if r.cfg.DeriveID != nil && ids.Check(m.ID) != nil {
		m.ID = r.derive(m)
	}
	it := item{d: d, m: m, session: s}
	if r.cfg.Ordered {
		it.key = r.key(m)
	}
	return it
}

// derive is the id by DeriveID. A message at which that panics or exits has none, and is refused.
func (r *receiver) derive(m *inbox.Message) (id uuid.UUID) {
	r.guard("DeriveID", func() { id = r.cfg.DeriveID(m) })
	return id
}

// key is the ordering key. A message at which ConsumerConfig.Key panics or exits has none.
func (r *receiver) key(m *inbox.Message) string {
	name := m.Key
	if r.cfg.Key != nil {
		name = ""
		r.guard("Key", func() { name = r.cfg.Key(m) })
	}
	return name
}

// guard calls a function of the program's on a goroutine that it may exit.
func (r *receiver) guard(field string, call func()) {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		defer func() {
			if v := recover(); v != nil {
				r.cfg.Logger.Error("Config."+field+" panicked", slog.Any("panic", v), slog.String("stack", string(debug.Stack())))
			}
		}()
		call()
	}()
	<-ended
}

// lost ends a session that failed, or could not be opened, and waits before the next.
func (r *receiver) lost(w wish, s *session, err error) {
	if s == nil && w.ctx.Err() != nil {
		return
	}
	r.signals.lost()
	if s != nil {
		if time.Since(s.began) > stable {
			r.failed = 0
		}
		r.close(s, err)
	} else {
		r.post(event{kind: ended, err: err})
	}
	pause := pauses.Delay(r.failed, r.cfg.Rand())
	r.failed++
	if repeats, ok := r.seldom.Due(); ok {
		r.cfg.Logger.WarnContext(r.ctx, "no session with the broker", slog.Any("error", err),
			slog.Int("failures", r.failed), slog.Duration("again_in", pause), slog.Int("repeats", repeats))
	}
	_ = runloop.Sleep(w.ctx, pause)
}

// close ends a session. The loop is told first: from then on nothing of it is settled.
func (r *receiver) close(s *session, err error) {
	s.over.Store(true)
	r.post(event{kind: ended, session: s, err: err})
	if closing := s.Close(r.ctx); closing != nil && err == nil && !errors.Is(closing, context.Canceled) {
		r.cfg.Logger.Warn("session not closed in order", slog.Any("error", closing))
	}
}
