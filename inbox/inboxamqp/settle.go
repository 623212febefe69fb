package inboxamqp

import (
	"context"
	"sync/atomic"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
)

// delivery is one hand-out of a message. Exactly one of acknowledge, giveBack and leaveIt
// takes effect on it, the first.
type delivery struct {
	raw   amqp.Delivery
	msg   *inbox.Message
	wait  time.Duration // of a long delay; the message only passes through
	s     *session
	epoch int64
	probe chan<- probed // nil unless the message is a probe
	began uint64        // when its processor did, on the run's clock

	batched bool   // processed together with others
	place   *place // while a worker attends to it

	done atomic.Bool
}

// accept makes a delivery of what arrived.
func (s *session) accept(raw amqp.Delivery) *delivery {
	cfg := s.r.c.cfg
	s.received = true
	s.running.Add(1)
	s.tags.add(raw.DeliveryTag)
	if size := int64(len(raw.Body)); size > s.r.largest.Load() {
		s.r.largest.Store(size)
	}
	return &delivery{raw: raw, msg: receive(raw, cfg), wait: waitHeader(raw, cfg.Retry.MaxAge), s: s, epoch: s.epoch}
}

// acknowledge tells the broker that the message is done with here.
func (d *delivery) acknowledge(as outcome) { acknowledge([]*delivery{d}, as) }

// acknowledge settles deliveries of one session, with as few calls as is safe.
func acknowledge(ds []*delivery, as outcome) {
	var mine []*delivery
	var tags []uint64
	for _, d := range ds {
		if d.done.CompareAndSwap(false, true) {
			mine, tags = append(mine, d), append(tags, d.raw.DeliveryTag)
		}
	}
	if len(mine) == 0 {
		return
	}
	s := mine[0].s
	if s.gone() || s.tags.acknowledge(tags, s.ch.Ack) != nil {
		as = stale
	}
	for _, d := range mine {
		d.settled(as)
	}
}

// giveBack returns the message to its queue, uncounted.
func (d *delivery) giveBack() {
	if !d.done.CompareAndSwap(false, true) {
		return
	}
	as := returned
	if d.s.gone() || d.raw.Nack(false, true) != nil {
		as = stale
	}
	d.s.tags.settle(d.raw.DeliveryTag)
	d.settled(as)
}

// leaveIt settles nothing: the session is over and the broker delivers the message again.
func (d *delivery) leaveIt() {
	if d.done.CompareAndSwap(false, true) {
		d.settled(stale)
	}
}

// settled counts. What was written went to the channel that the message came from, which its
// session never reopens: on an old one the client refuses, and the broker has the message
// back already.
func (d *delivery) settled(as outcome) {
	d.s.r.c.signals.count(context.Background(), as)
	d.s.running.Add(-1)
	select {
	case d.s.settled <- struct{}{}:
	default:
	}
}

// gone reports whether settling can have no effect any more.
func (s *session) gone() bool {
	if s.over.Load() {
		return true
	}
	select {
	case <-s.conn.Done():
		return true
	default:
		return s.ch.IsClosed()
	}
}

// report tells a paused session what a probe shows about the servers.
func (d *delivery) report(p probed) {
	if d.probe != nil {
		d.probe <- p
	}
}
