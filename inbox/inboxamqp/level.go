package inboxamqp

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

// leveling is about how often a process looks whether it serves more partitions than its share.
const leveling = 10 * time.Second

// level gives up partitions that are above this process's share, until ctx ends.
func (p *partitions) level(ctx context.Context, conn *amqpconn.Conn) {
	pause := p.base.cfg.leveling
	for runloop.Sleep(ctx, pause/2+rand.N(pause)) == nil {
		for _, l := range p.excess(conn) {
			l.giveUp()
		}
	}
}

// excess returns the lanes above the share. The broker does not tell which consumer it serves, so
// those count that have delivered something.
func (p *partitions) excess(conn *amqpconn.Conn) []*lane {
	var serving []*lane
	for _, part := range p.parts {
		if part.lane.serving.Load() {
			serving = append(serving, part.lane)
		}
	}
	if len(serving) < 2 {
		return nil
	}
	processes := max(p.count(conn), 1)
	share := (len(p.parts) + processes - 1) / processes
	rand.Shuffle(len(serving), func(i, j int) { serving[i], serving[j] = serving[j], serving[i] })
	return serving[min(share, len(serving)):]
}

// members is the queue by which the processes of a partitioned consumer are counted: each consumes it,
// and it stays empty. A quorum queue with a single active consumer does not count those that stand by.
func (s *settings) members() string { return s.queue + ".members" }

// enlist has a connection count as a process until it ends.
func (p *partitions) enlist(conn *amqpconn.Conn) error {
	queue := p.base.of(p.base.cfg.members())
	exists, err := conn.QueueExists(queue.queue)
	if err != nil {
		return fmt.Errorf("look for queue %q: %w", queue.queue, err)
	}
	if !exists {
		return queue.missing()
	}
	ch, err := conn.Channel()
	if err != nil {
		return fmt.Errorf("open channel: %w", err)
	}
	return conn.Within(func() error {
		if err := ch.Qos(1, 0, false); err != nil {
			return err
		}
		_, err := ch.Consume(queue.queue, p.base.cfg.Name+"-"+uuid.NewString(), false, false, false, false, nil)
		return err
	})
}

// count is how many processes there are; 0 when the broker does not tell.
func (p *partitions) count(conn *amqpconn.Conn) int {
	q, err := conn.Count(p.base.cfg.members())
	if err != nil {
		return 0
	}
	return q.Consumers
}
