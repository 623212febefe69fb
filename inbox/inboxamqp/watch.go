package inboxamqp

import (
	"fmt"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
)

// maxSlack bounds by how many bytes silent connections prolong the patience with further ones.
const maxSlack = 128 << 20

// open opens the channel on a connection that is watched.
func (r *run) open(conn *amqpconn.Conn) (*amqp.Channel, error) {
	if err := conn.Watch(r.pending); err != nil {
		return nil, err
	}
	ch, err := conn.Channel()
	if err != nil {
		return nil, fmt.Errorf("open channel: %w", err)
	}
	return ch, nil
}

// pending is how much may be on its way from the broker before it answers a question.
func (r *run) pending() int { return int(2*r.largest.Load() + r.slack.Load()) }

// noteSilence gives the next connection more time than one on which nothing came before the broker
// seemed to be silent: it may have been sending a large message over a slow line, and would never
// get it through.
func (r *run) noteSilence(silent bool) {
	if !silent {
		r.slack.Store(0)
		return
	}
	r.slack.Store(min(2*r.slack.Load()+driver.MaxBodyBytes, maxSlack))
}
