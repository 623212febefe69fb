package inboxamqp

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/backoff"
)

// probes are the waits before a paused consumer tries one message: 0.5 s growing to 30 s, spread by half.
var probes = backoff.Policy{Base: 500 * time.Millisecond, Max: 30 * time.Second, Jitter: 0.5}

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
			continue
		}
		if available, err := s.probe(); available || err != nil {
			return err
		}
	}
}

// probe has one message processed. With none in the queue, consuming goes on: the next
// message to arrive is the probe.
func (s *session) probe() (available bool, err error) {
	var raw amqp.Delivery
	var found bool
	if err := s.conn.Within(func() (err error) {
		raw, found, err = s.ch.Get(s.r.c.cfg.Queue, false)
		return err
	}); err != nil {
		return false, fmt.Errorf("get from %q: %w", s.r.c.cfg.Queue, err)
	}
	if !found {
		return true, nil
	}
	d := s.accept(raw)
	d.probe = make(chan bool, 1)
	select {
	case s.r.jobs <- []*delivery{d}:
		s.r.count([]*delivery{d})
	case <-s.r.stop.Done():
		d.giveBack()
		return false, errStop
	case err := <-s.closes:
		return false, closed(err)
	case <-s.conn.Done():
		return false, s.conn.Err()
	}
	select {
	case available = <-d.probe:
		return available, nil
	case <-s.r.stop.Done():
		return false, errStop
	case err := <-s.closes:
		return false, closed(err)
	case <-s.conn.Done():
		return false, s.conn.Err()
	}
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
