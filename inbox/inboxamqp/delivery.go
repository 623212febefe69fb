package inboxamqp

import (
	"sync/atomic"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
)

// delivery is one hand-out of a message. Exactly one of acknowledge, giveBack and leaveIt
// takes effect on it, the first.
type delivery struct {
	raw  amqp.Delivery
	msg  *inbox.Message
	wait time.Duration // of a long delay; the message only passes through

	ch       *channel
	evidence *evidence     // of its session
	epoch    int64         // of that
	probe    chan<- probed // nil unless the message is a probe

	began   uint64 // when its processor did, on the workers' clock
	batched bool   // processed together with others
	place   *place // while a worker attends to it

	done atomic.Bool
}

// acknowledge tells the broker that the message is done with here.
func (d *delivery) acknowledge(as outcome) { acknowledge([]*delivery{d}, as) }

// acknowledge settles deliveries of one channel, with as few calls as is safe.
func acknowledge(ds []*delivery, as outcome) {
	var tags []uint64
	var mine []*delivery
	for _, d := range ds {
		if d.done.CompareAndSwap(false, true) {
			mine, tags = append(mine, d), append(tags, d.raw.DeliveryTag)
		}
	}
	if len(mine) == 0 {
		return
	}
	ch := mine[0].ch
	if ch.gone() || ch.tags.acknowledge(tags, ch.amqp.Ack) != nil {
		as = stale
	}
	for range mine {
		ch.count(as)
	}
}

// giveBack returns the message to its queue, uncounted.
func (d *delivery) giveBack() {
	if !d.done.CompareAndSwap(false, true) {
		return
	}
	as := returned
	if d.ch.gone() || d.raw.Nack(false, true) != nil {
		as = stale
	}
	d.ch.tags.settle(d.raw.DeliveryTag)
	d.ch.count(as)
}

// leaveIt settles nothing: the session is over and the broker delivers the message again.
func (d *delivery) leaveIt() {
	if d.done.CompareAndSwap(false, true) {
		d.ch.count(stale)
	}
}

// report tells a paused session what a probe shows about the servers.
func (d *delivery) report(p probed) {
	if d.probe != nil {
		d.probe <- p
	}
}
