package inboxamqp

import (
	"errors"
	"log/slog"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/backoff"
)

// probes are the waits before a paused consumer tries messages: 0.5 s growing to 2 s, spread by half.
// Not more, since the ones before may have failed by themselves, and a pause outlives its cause.
var probes = backoff.Policy{Base: 500 * time.Millisecond, Max: 2 * time.Second, Jitter: 0.5, JitterAfterCap: true}

const (
	// probeWait is how long a probe waits for the first message of the queue.
	probeWait = time.Second

	// probeGap is how long it waits for a further one.
	probeGap = 100 * time.Millisecond
)

// pause waits and tries a few messages at a time until one can be processed.
func (s *session) pause(why error) error {
	for n := 0; ; n++ {
		pause := probes.Delay(n, s.r.c.cfg.Rand())
		s.r.c.cfg.Logger.Warn("paused", slog.Any("why", why), slog.Duration("again_in", pause))
		timer := time.NewTimer(pause)
		err := s.wait(timer.C)
		timer.Stop()
		if err != nil {
			return err
		}
		// More each time, up to one for each worker: the first ones may be those that fail by themselves.
		available, err := s.probe(1 << min(n, 10))
		if err != nil || available {
			return err
		}
	}
}

// probed is what a message shows about the servers that processing needs.
type probed struct {
	available bool // as far as one can tell
	passed    bool // for sure: the message was processed
}

// probe has messages processed: others than those that have failed, if there are any. It reports
// whether consuming may go on: one went through, or none shows that a server is missing. With none
// in the queue the next ones to arrive are the probe.
func (s *session) probe(most int) (available bool, err error) {
	most = max(min(most, s.r.c.cfg.Concurrency, s.r.left()), 1)
	ds, err := s.fetch(most)
	if err == nil && len(ds) == 0 && s.trial.release() {
		ds, err = s.fetch(most)
	}
	if err != nil {
		return false, err
	}
	results := make(chan probed, len(ds))
	for i, d := range ds {
		d.probe = results
		if err := s.hand(d); err != nil {
			for _, d := range ds[i:] {
				d.giveBack()
			}
			return false, err
		}
	}
	available = true
	for range ds {
		select {
		case p := <-results:
			if p.passed {
				return true, nil
			}
			available = available && p.available
		case <-s.r.stop.Done():
			return false, errStop
		case err := <-s.closes:
			return false, closed(err)
		case <-s.conn.Done():
			return false, s.conn.Err()
		}
	}
	return available, nil
}

// hand gives a message to a worker.
func (s *session) hand(d *delivery) error {
	select {
	case s.r.jobs <- []*delivery{d}:
		s.r.count([]*delivery{d})
		return nil
	case <-s.r.stop.Done():
		return errStop
	case err := <-s.closes:
		return closed(err)
	case <-s.conn.Done():
		return s.conn.Err()
	}
}

// fetch takes messages out of the queue, without staying its consumer. A consumer that may have
// only so many does that on every queue, where basic.get is refused by one with a single active
// consumer, and closes the channel.
func (s *session) fetch(most int) ([]*delivery, error) {
	deliveries, err := s.subscribe(most)
	if err != nil {
		return nil, err
	}
	ds, why := s.gather(deliveries, most)
	if why != nil && !errors.Is(why, errStop) {
		for _, d := range ds {
			d.leaveIt()
		}
		return nil, why
	}
	var unwanted []*delivery
	if why != nil {
		unwanted, ds = ds, nil
	}
	if err := s.leave(deliveries, unwanted); err != nil {
		return nil, err
	}
	return ds, why
}

// gather receives until there are enough, or no more come for a while.
func (s *session) gather(deliveries <-chan amqp.Delivery, most int) (ds []*delivery, why error) {
	timer := time.NewTimer(probeWait)
	defer timer.Stop()
	for len(ds) < most {
		select {
		case raw, open := <-deliveries:
			if !open {
				return ds, s.cause()
			}
			ds = append(ds, s.accept(raw))
			timer.Reset(probeGap)
		case <-timer.C:
			return ds, nil
		case <-s.r.stop.Done():
			return ds, errStop
		case err := <-s.closes:
			return ds, closed(err)
		case <-s.conn.Done():
			return ds, s.conn.Err()
		}
	}
	return ds, nil
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
