package inboxamqp

import (
	"fmt"
	"sync/atomic"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
)

// maxSlack bounds by how many bytes silent connections prolong the patience with further ones.
const maxSlack = 128 << 20

// silence knows how long a broker may be silent: as long as what may be on its way takes.
type silence struct {
	largest atomic.Int64 // body that was received, in bytes
	slack   atomic.Int64 // more bytes that may be on their way
}

// open opens the channel on a connection that is watched.
func (s *silence) open(conn *amqpconn.Conn) (*amqp.Channel, error) {
	if err := conn.Watch(s.pending); err != nil {
		return nil, err
	}
	ch, err := conn.Channel()
	if err != nil {
		return nil, fmt.Errorf("open channel: %w", err)
	}
	return ch, nil
}

// pending is how much may be on its way from the broker before it answers a question.
func (s *silence) pending() int { return int(2*s.largest.Load() + s.slack.Load()) }

// received notes the size of a body.
func (s *silence) received(size int) {
	if int64(size) > s.largest.Load() {
		s.largest.Store(int64(size))
	}
}

// note gives the next connection more time than one on which nothing came before the broker
// seemed to be silent: it may have been sending a large message over a slow line, and would never
// get it through.
func (s *silence) note(silent bool) {
	if !silent {
		s.slack.Store(0)
		return
	}
	s.slack.Store(min(2*s.slack.Load()+driver.MaxBodyBytes, maxSlack))
}
