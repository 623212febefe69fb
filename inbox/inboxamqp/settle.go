package inboxamqp

import (
	"context"
	"sync/atomic"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
)

// delivery is one hand-out of a message. Exactly one of acknowledge, giveBack and leaveIt
// takes effect on it, the first.
type delivery struct {
	raw   amqp.Delivery
	msg   *inbox.Message
	s     *session
	epoch int64
	probe chan bool // nil unless the message is a probe

	done atomic.Bool
}

// accept makes a delivery of what arrived.
func (s *session) accept(raw amqp.Delivery) *delivery {
	s.running.Add(1)
	return &delivery{raw: raw, msg: convert(raw, s.r.c.cfg.Queue), s: s, epoch: s.epoch}
}

// acknowledge tells the broker that the message is done with here.
func (d *delivery) acknowledge(as outcome) {
	d.settle(as, func() error { return d.raw.Ack(false) })
}

// giveBack returns the message to its queue, uncounted.
func (d *delivery) giveBack() {
	d.settle(returned, func() error { return d.raw.Nack(false, true) })
}

// leaveIt settles nothing: the session is over and the broker delivers the message again.
func (d *delivery) leaveIt() {
	d.settle(stale, func() error { return nil })
}

// settle writes to the channel that the message came from, which its session never
// reopens: on an old one the client refuses, and the broker has the message back already.
func (d *delivery) settle(as outcome, write func() error) {
	if !d.done.CompareAndSwap(false, true) {
		return
	}
	if d.gone() || write() != nil {
		as = stale
	}
	d.s.r.c.signals.count(context.Background(), as)
	d.s.running.Add(-1)
	select {
	case d.s.settled <- struct{}{}:
	default:
	}
}

// gone reports whether settling can have no effect any more.
func (d *delivery) gone() bool {
	if d.s.over.Load() {
		return true
	}
	select {
	case <-d.s.conn.Done():
		return true
	default:
		return d.s.ch.IsClosed()
	}
}

// report tells the session whether processing was possible.
func (d *delivery) report(available bool) {
	if d.probe != nil {
		d.probe <- available
		return
	}
	if available {
		return
	}
	select {
	case d.s.pauses <- d.epoch:
	default:
	}
}
