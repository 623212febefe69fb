package inboxamqp

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/backoff"
)

// probes are the waits before a paused consumer tries one message: 0.5 s growing to 5 s, spread by half.
// Not more, since the one before may have failed by itself, and good ones come.
var probes = backoff.Policy{Base: 500 * time.Millisecond, Max: 5 * time.Second, Jitter: 0.5, JitterAfterCap: true}

// pause waits and tries one message at a time until one can be processed.
func (s *session) pause(why error) error {
	for n := 0; ; n++ {
		pause := probes.Delay(n, rand.Float64())
		s.r.c.cfg.Logger.Warn("paused", slog.Any("why", why), slog.Duration("again_in", pause))
		timer := time.NewTimer(pause)
		err := s.wait(timer.C)
		timer.Stop()
		if err != nil {
			return err
		}
		if s.r.healthy() != nil {
			s.trial.release()
			continue
		}
		p, err := s.probe()
		if err != nil {
			return err
		}
		if p.passed {
			s.judge()
		}
		if p.available {
			return nil
		}
	}
}

// probed is what a message shows about the servers that processing needs.
type probed struct {
	available bool // as far as one can tell
	passed    bool // for sure: the message was processed
}

// probe has one message processed: another one than those that have failed, if there is one.
// With none in the queue, consuming goes on: the next message to arrive is the probe.
func (s *session) probe() (p probed, err error) {
	raw, found, err := s.get()
	if err == nil && !found && s.trial.release() {
		raw, found, err = s.get()
	}
	if err != nil {
		return p, err
	}
	if !found {
		return probed{available: true}, nil
	}
	d := s.accept(raw)
	d.probe = make(chan probed, 1)
	select {
	case s.r.jobs <- []*delivery{d}:
		s.r.count([]*delivery{d})
	case <-s.r.stop.Done():
		d.giveBack()
		return p, errStop
	case err := <-s.closes:
		return p, closed(err)
	case <-s.conn.Done():
		return p, s.conn.Err()
	}
	select {
	case p = <-d.probe:
		return p, nil
	case <-s.r.stop.Done():
		return p, errStop
	case err := <-s.closes:
		return p, closed(err)
	case <-s.conn.Done():
		return p, s.conn.Err()
	}
}

func (s *session) get() (raw amqp.Delivery, found bool, err error) {
	err = s.conn.Within(func() (err error) {
		raw, found, err = s.ch.Get(s.r.c.cfg.Queue, false)
		return err
	})
	if err != nil {
		return raw, false, fmt.Errorf("get from %q: %w", s.r.c.cfg.Queue, err)
	}
	return raw, found, nil
}

// wait returns nil once done, or the reason why there is nothing left to wait for.
func (s *session) wait(done <-chan time.Time) error {
	select {
	case <-done:
		return nil
	case <-s.r.stop.Done():
		return errStop
	case err := <-s.closes:
		return closed(err)
	case <-s.conn.Done():
		return s.conn.Err()
	}
}
