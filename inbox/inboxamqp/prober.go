package inboxamqp

import (
	"errors"
	"log/slog"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/backoff"
)

// probes are the waits before a paused consumer tries messages: 0.5 s growing to 2 s, spread by
// half. Not more, since the ones before may have failed by themselves, and a pause outlives its
// cause.
var probes = backoff.Policy{Base: 500 * time.Millisecond, Max: 2 * time.Second, Jitter: 0.5, JitterAfterCap: true}

const (
	// probeWait is how long a probe waits for the first message of the queue.
	probeWait = time.Second

	// probeGap is how long it waits for a further one.
	probeGap = 100 * time.Millisecond
)

// probed is what a message shows about the servers that processing needs.
type probed struct {
	available bool // as far as one can tell
	passed    bool // for sure: the message was processed
}

// prober is a session in a pause.
type prober struct{ s *session }

// pause waits and tries a few messages at a time until one can be processed.
func (p *prober) pause(why error) error {
	cfg := p.s.cfg
	for n := 0; ; n++ {
		pause := probes.Delay(n, cfg.Rand())
		cfg.Logger.Warn("paused", slog.Any("why", why), slog.Duration("again_in", pause))
		timer := time.NewTimer(pause)
		err := p.wait(timer.C)
		timer.Stop()
		if err != nil {
			return err
		}
		// More each time, up to one for each worker: the first ones may be those that fail by
		// themselves.
		available, err := p.try(1 << min(n, 10))
		if err != nil || available {
			return err
		}
	}
}

// try has messages processed: others than those that have failed, if there are any. It reports
// whether consuming may go on: one went through, or none shows that a server is missing. With none
// in the queue the next ones to arrive are the probe.
func (p *prober) try(most int) (available bool, err error) {
	most = max(min(most, p.s.cfg.Concurrency, p.s.run.quota.left()), 1)
	ds, err := p.fetch(most)
	if err == nil && len(ds) == 0 && p.s.evidence.trial.release() {
		ds, err = p.fetch(most)
	}
	if err != nil {
		return false, err
	}
	results := make(chan probed, len(ds))
	for i, d := range ds {
		d.probe = results
		if err := p.hand(d); err != nil {
			for _, d := range ds[i:] {
				d.giveBack()
			}
			return false, err
		}
	}
	return p.await(results)
}

// await waits for what the probes show, until one is enough.
func (p *prober) await(results <-chan probed) (available bool, err error) {
	available = true
	for range cap(results) {
		select {
		case result := <-results:
			if result.passed {
				return true, nil
			}
			available = available && result.available
		case <-p.s.run.life.stop.Done():
			return false, errStop
		case err := <-p.s.ch.closes:
			return false, closed(err)
		case <-p.s.ch.conn.Done():
			return false, p.s.ch.conn.Err()
		}
	}
	return available, nil
}

// hand gives a message to a worker.
func (p *prober) hand(d *delivery) error {
	select {
	case p.s.run.workers.jobs <- []*delivery{d}:
		p.s.run.quota.count([]*delivery{d})
		return nil
	case <-p.s.run.life.stop.Done():
		return errStop
	case err := <-p.s.ch.closes:
		return closed(err)
	case <-p.s.ch.conn.Done():
		return p.s.ch.conn.Err()
	}
}

// fetch takes messages out of the queue, without staying its consumer. A consumer that may have
// only so many does that on every queue, where basic.get is refused by one with a single active
// consumer, and closes the channel.
func (p *prober) fetch(most int) ([]*delivery, error) {
	deliveries, err := p.s.ch.subscribe(p.s.cfg.queue, p.s.cfg.Name, most)
	if err != nil {
		return nil, err
	}
	ds, why := p.gather(deliveries, most)
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
	if err := p.s.leave(deliveries, unwanted); err != nil {
		return nil, err
	}
	return ds, why
}

// gather receives until there are enough, or no more come for a while.
func (p *prober) gather(deliveries <-chan amqp.Delivery, most int) (ds []*delivery, why error) {
	timer := time.NewTimer(probeWait)
	defer timer.Stop()
	for len(ds) < most {
		select {
		case raw, open := <-deliveries:
			if !open {
				return ds, p.s.ch.cause()
			}
			ds = append(ds, p.s.accept(raw))
			timer.Reset(probeGap)
		case <-timer.C:
			return ds, nil
		case <-p.s.run.life.stop.Done():
			return ds, errStop
		case err := <-p.s.ch.closes:
			return ds, closed(err)
		case <-p.s.ch.conn.Done():
			return ds, p.s.ch.conn.Err()
		}
	}
	return ds, nil
}

// wait returns nil once done, or the reason why there is nothing left to wait for.
func (p *prober) wait(done <-chan time.Time) error {
	select {
	case <-done:
		return nil
	case <-p.s.run.life.stop.Done():
		return errStop
	case err := <-p.s.ch.closes:
		return closed(err)
	case <-p.s.ch.conn.Done():
		return p.s.ch.conn.Err()
	}
}
