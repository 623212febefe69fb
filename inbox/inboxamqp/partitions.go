package inboxamqp

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/engine"
	"github.com/holdfast-go/holdfast/inbox/internal/group"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/partition"
)

// partitioned reports whether the consumer reads several queues.
func (s *settings) partitioned() bool { return s.Partitions > 1 }

// partition is the name of a partition's queue.
func (s *settings) partition(i int) string { return partition.Name(s.queue, i) }

// validatePartitions reports every violation that has to do with Config.Partitions.
func (s *settings) validatePartitions(fail func(format string, args ...any)) {
	if err := partition.Check(s.Partitions); err != nil {
		fail("Config.Partitions: %w", err)
	}
	if !s.partitioned() {
		return
	}
	if !s.Ordered {
		fail("Config.Partitions needs Ordered")
	}
	if s.Key != nil {
		fail("Config.Partitions excludes Config.Key: the sender's key says which partition a message is in")
	}
	if s.ParkKeys {
		fail("Config.Partitions excludes Config.ParkKeys: the parked keys of all partitions are kept together")
	}
}

// newRunner returns the consumer of the source's queue, or of all partitions.
func newRunner(whole *source, p inbox.Processor, cfg engine.Config) (runner, error) {
	if !whole.cfg.partitioned() || whole.cfg.Partitions > partition.Max { // which is reported
		return engine.New(whole, p, cfg)
	}
	var all []group.Partition
	for _, queue := range whole.cfg.read() {
		all = append(all, group.Partition{Name: queue, Source: &part{source: whole.of(queue)}})
	}
	return group.New(p, group.Config{
		Consumer: cfg, Whole: whole, Partitions: all, Members: &members{source: whole}, Leveling: whole.cfg.leveling,
	})
}

// part is the source of one partition. Its sessions have connections of their own. The connection for copies is
// that of all partitions.
type part struct {
	*source
	current atomic.Pointer[session]
}

// Open implements driver.Source.
func (p *part) Open(ctx context.Context) (driver.Session, error) {
	s, err := p.source.open(ctx)
	if err != nil {
		return nil, err
	}
	p.current.Store(s)
	return s, nil
}

// Run implements driver.Source: members runs what a source runs, once.
func (p *part) Run(ctx context.Context) { <-ctx.Done() }

// Served implements group.Source. The broker does not tell which consumer it serves: it serves one that has
// received something.
func (p *part) Served() bool {
	s := p.current.Load()
	return s != nil && s.received.Load() && !s.gone()
}

// members are the processes that share the partitions. Each consumes one queue, and the broker counts its consumers.
type members struct {
	source *source
	conn   atomic.Pointer[amqpconn.Conn]
}

// Run implements group.Members. It also keeps the connection for copies.
func (m *members) Run(ctx context.Context) {
	var copies sync.WaitGroup
	copies.Go(func() { m.source.Run(ctx) })
	cfg := amqpconn.LoopConfig{Dial: m.source.dial, Timeout: m.source.cfg.Timeout, Logger: m.source.cfg.Logger}
	amqpconn.Loop(ctx, cfg, m.attend)
	copies.Wait()
}

// attend counts this process while the connection lasts.
func (m *members) attend(ctx context.Context, conn *amqpconn.Conn) error {
	gone, err := m.enlist(conn)
	if err != nil {
		return err
	}
	m.conn.Store(conn)
	defer m.conn.Store(nil)
	select {
	case <-ctx.Done():
		return nil
	case <-conn.Done():
		return conn.Err()
	case <-gone:
		return fmt.Errorf("queue %q: %w", m.source.cfg.members(), errCancelled)
	}
}

// enlist consumes the queue of the members. The channel that it returns is closed when the broker ends that.
func (m *members) enlist(conn *amqpconn.Conn) (gone <-chan string, err error) {
	if err := conn.Watch(m.source.silence.pending); err != nil {
		return nil, err
	}
	queue := m.source.of(m.source.cfg.members())
	exists, err := conn.QueueExists(queue.queue)
	if err != nil {
		return nil, fmt.Errorf("look for queue %q: %w", queue.queue, err)
	}
	if !exists {
		return nil, queue.missing()
	}
	ch, err := conn.Channel()
	if err != nil {
		return nil, fmt.Errorf("open channel: %w", err)
	}
	gone = ch.NotifyCancel(make(chan string, 1))
	err = conn.Within(func() error {
		if err := ch.Qos(1, 0, false); err != nil {
			return err
		}
		_, err := ch.Consume(queue.queue, m.source.cfg.Name+"-"+uuid.NewString(), false, false, false, false, nil)
		return err
	})
	return gone, err
}

// Count implements group.Members.
func (m *members) Count(context.Context) int {
	conn := m.conn.Load()
	if conn == nil {
		return 0
	}
	q, err := conn.Count(m.source.cfg.members())
	if err != nil {
		return 0
	}
	return q.Consumers
}
