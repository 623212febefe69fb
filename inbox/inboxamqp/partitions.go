package inboxamqp

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/engine"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/internal/inbox/group"
	"github.com/holdfast-go/holdfast/internal/partition"
	"github.com/holdfast-go/holdfast/internal/wire"
)

// Partitions.
//
// With Queue.Partitions of 4 the consumer of "orders" reads the queues "orders.0" to "orders.3", each with a
// single active consumer. The sender chooses the slot of a key: outboxamqp adds a second routing key to messages
// with an ordering key, holdfast.slot.<n> in the header CC, where n is the CRC-32 of the key modulo 64. Setup
// makes "orders" a direct exchange and binds it to the exchanges of Queue.Bindings. It binds each slot's partition
// to "orders"; the partition is n modulo the number of partitions. So all messages of a key are in one partition,
// even after broker restarts, and senders need not know the number of partitions. While a partition is missing,
// its keys have no route.
//
// Messages without a slot have no key, or come from other senders. They all go to the first partition, through the
// exchange "orders.slotless.4". Other senders can set the header themselves. A program that publishes to the queue
// "orders" through the default exchange must publish to the exchange "orders" instead.
//
// Run runs one consumer for each partition concurrently. Concurrency, Batch, Prefetch and the handler limits apply
// to each partition: a process that serves 4 partitions with a Concurrency of 8 runs up to 32 handlers. TimeLimit,
// MessageLimit and MemoryLimit end the whole Run; MessageLimit counts the messages of all partitions. A message
// that may have crashed the process runs alone in the process. Each partition pauses independently while a server
// is down. While a partition is missing, Ready and the log name it, and the other partitions are served. Run needs
// a connection for each partition, one for copies, and one to count the processes.
//
// The Queue of a message, the attribute queue in logs and metrics and the origin of a dead letter name the
// partition. The metrics dead_letters and backlog name the queue "orders", because the dead letters of all partitions
// are in the same queues. Replay publishes a dead letter to the exchange, and so to the partition of its slot.
//
// The broker serves each partition to the process that subscribed first. About every 10 seconds a process compares
// its partitions with its share: the number of partitions divided by the number of processes, rounded up. It
// releases the partitions above its share. For each, it stops receiving, waits for running handlers as on
// shutdown, closes the session and subscribes again behind the other processes. No message is processed twice
// because of that, unless a handler ignores cancellation for longer than ShutdownTimeout. The next process tries a
// message that waits for a retry at once; without a ledger its attempts start at 1 again. A partition counts after
// it has delivered a message. The queue "orders.members" counts the processes: each process consumes it, and it
// stays empty. When a process ends or crashes, other processes get its partitions at once.
//
// Another number of partitions moves keys to other partitions, and later messages of a key could overtake queued
// ones. So stop the publishers, for example the relay, until the partitions are empty, and delete the exchange and
// the old queues. Setup fails if any of them still exists, and Check reports it. Run and Ready of a process with
// another number return errors. The guide examples/guides/production.md has the steps. Bind no other queue to the
// exchange. Replay needs permission to write to it.

// partitioned reports whether the consumer reads several queues.
func (s *settings) partitioned() bool { return s.Partitions > 1 }

// partition returns the name of a partition's queue.
func (s *settings) partition(i int) string { return partition.Name(s.queue, i) }

// newRunner returns the consumer of the source's queue, or of all partitions.
func newRunner(whole *source, p inbox.Processor, cfg engine.Config) (runner, error) {
	if !whole.cfg.partitioned() || whole.cfg.Partitions > partition.Max { // validate reports it
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

// part is the source of one partition. Each session has its own connection. All partitions share the connection
// for copies.
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

// Run implements driver.Source. members runs the shared parts of the sources once.
func (p *part) Run(ctx context.Context) { <-ctx.Done() }

// Served implements group.Source. The broker does not report which consumer it serves, so a partition counts as
// served after its session received something.
func (p *part) Served() bool {
	s := p.current.Load()
	return s != nil && s.received.Load() && !s.gone()
}

// members counts the processes that share the partitions. Each process consumes one queue, and the broker counts
// the consumers of that queue.
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

// enlist consumes the queue of the members. The returned channel is closed when the broker cancels the consumer.
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
		_, err := ch.Consume(queue.queue, m.source.cfg.ConsumerConfig.Name+"-"+uuid.NewString(), false, false, false, false, nil)
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

// Two exchanges precede the partitions. The first is a direct exchange with the consumer's name. Senders write the
// slot of a key into the header CC, and the first exchange has a binding from each slot to a partition. Messages
// without a slot continue to the second exchange, and from there to the first partition.
//
// The first exchange is also bound to itself for all slots. A key whose partition is missing then has no route, as
// without partitions. Otherwise the message would continue to the second exchange, and its key would be in two
// partitions after its partition is declared again.

// slotless returns the name of the second exchange. It contains the number of partitions. The broker compares the
// name when the first exchange is declared, and so rejects another number.
func (s *settings) slotless() string { return s.queue + ".slotless." + strconv.Itoa(s.Partitions) }

var errLeftover = errors.New("it belongs to a different partition count and still receives messages: see \"Partitions\" in the package's doc")

// declareSlots declares both exchanges, unless a queue of another number of partitions exists.
func (s *settings) declareSlots(conn *amqpconn.Conn) (made bool, err error) {
	for _, name := range s.leftovers() {
		exists, err := conn.QueueExists(name)
		if err != nil {
			return false, fmt.Errorf("look for queue %q: %w", name, err)
		}
		if exists {
			return false, fmt.Errorf("queue %q: %w", name, errLeftover)
		}
	}
	if !s.partitioned() {
		return false, nil
	}
	if made, err = declareSame(conn, s.queue, s.slotExchange); err != nil {
		return made, fmt.Errorf("exchange %q: %w", s.queue, err)
	}
	for slot := range partition.Slots {
		err := conn.Try(func(ch *amqp.Channel) error {
			return ch.ExchangeBind(s.queue, partition.SlotName(slot), s.queue, false, nil)
		})
		if amqpconn.IsRefused(err) && !made {
			break
		}
		if err != nil {
			return made, fmt.Errorf("binding of exchange %q to itself: %w", s.queue, err)
		}
	}
	second, err := declareSame(conn, s.slotless(), func(ch *amqp.Channel) error {
		return ch.ExchangeDeclare(s.slotless(), amqp.ExchangeFanout, true, false, false, false, nil)
	})
	if err != nil {
		return made, fmt.Errorf("exchange %q: %w", s.slotless(), err)
	}
	return made || second, nil
}

// slotExchange declares the first exchange. The broker refuses if an exchange of another type, or for another
// number of partitions, has this name.
func (s *settings) slotExchange(ch *amqp.Channel) error {
	return ch.ExchangeDeclare(s.queue, amqp.ExchangeDirect, true, false, false, false, amqp.Table{"alternate-exchange": s.slotless()})
}

// members returns the name of the queue that counts the processes of a partitioned consumer. Each process consumes
// it, and it stays empty. The partitions themselves cannot count them, because a quorum queue with a single active
// consumer does not count the waiting consumers.
func (s *settings) members() string { return s.queue + ".members" }

// leftovers returns the names of queues that exist only for another number of partitions. With partitions, these
// are the unpartitioned queue and all higher partitions. Without partitions, it is only the queue that counts
// processes, because a queue with a number may belong to another consumer.
func (s *settings) leftovers() []string {
	if !s.partitioned() {
		return []string{s.members()}
	}
	names := []string{s.queue}
	for i := s.Partitions; i < partition.Max; i++ {
		names = append(names, s.partition(i))
	}
	return names
}

// bindPartitions binds each slot to its partition, and the first partition to the second exchange.
func (s *settings) bindPartitions(conn *amqpconn.Conn) error {
	if !s.partitioned() {
		return nil
	}
	for slot := range partition.Slots {
		if err := bindQueue(conn, s.partition(slot%s.Partitions), partition.SlotName(slot), s.queue); err != nil {
			return err
		}
	}
	return bindQueue(conn, s.partition(0), "", s.slotless())
}

func bindQueue(conn *amqpconn.Conn, queue, key, exchange string) error {
	err := conn.Try(func(ch *amqp.Channel) error { return ch.QueueBind(queue, key, exchange, false, nil) })
	if err != nil {
		return fmt.Errorf("binding of queue %q to exchange %q: %w", queue, exchange, err)
	}
	return nil
}

// bind makes a binding of the Config.
func (s *settings) bind(conn *amqpconn.Conn, b Binding) error {
	return conn.Try(func(ch *amqp.Channel) error {
		if s.partitioned() {
			return ch.ExchangeBind(s.queue, b.Key, b.Exchange, false, nil)
		}
		return ch.QueueBind(s.queue, b.Key, b.Exchange, false, nil)
	})
}

// checkSlots looks for queues of another number of partitions, and for the exchanges.
func (s *settings) checkSlots(view *amqpconn.View, found *check.Findings) error {
	for _, name := range s.leftovers() {
		seen, err := view.Queue(name)
		if err != nil {
			return err
		}
		if seen == amqpconn.Exists {
			found.Add("process all messages with the partition count of the queue, then delete all partitions", "queue %q: %v", name, errLeftover)
		}
	}
	if !s.partitioned() {
		return nil
	}
	for _, name := range []string{s.queue, s.slotless()} {
		seen, err := view.Exchange(name)
		if err != nil {
			return err
		}
		if seen == amqpconn.Missing {
			found.Add("call Consumer.Setup", "exchange %q does not exist, so the partitions do not receive all messages", name)
		} else if seen == amqpconn.Exists && name == s.queue {
			if err := s.checkSlotExchange(view.Conn, found); err != nil {
				return err
			}
		}
	}
	return nil
}

func (s *settings) checkSlotExchange(conn *amqpconn.Conn, found *check.Findings) error {
	err := conn.Try(s.slotExchange)
	reply, refused := errors.AsType[*amqp.Error](err)
	if refused && reply.Code == amqp.PreconditionFailed {
		found.Add("change the number as described in \"Partitions\" in the package's doc, or give the consumer another queue",
			"exchange %q does not match %d partitions: %s", s.queue, s.Partitions, reply.Reason)
		return nil
	}
	if amqpconn.IsRefused(err) {
		found.Add("call Check once as the user that calls Setup, or grant configure on it",
			"exchange %q was not compared, because the user may not configure it", s.queue)
		return nil
	}
	return err
}

// returned returns a dead letter in the form in which it goes back to its queue. A dead letter from a partition,
// or from the queue before it was partitioned, goes to the partition of its slot, for any earlier number of
// partitions.
func (s *settings) returned(raw amqp.Delivery, queue string) amqpconn.Out {
	out := amqpconn.Out{Key: queue, Message: replayCopy(raw)}
	if !s.partitioned() || queue != s.queue && !slices.Contains(partition.Names(s.queue, partition.Max), queue) {
		return out
	}
	if key := header(raw, wire.HeaderKey); queue == s.queue && key != "" && slotOf(raw.Headers) == "" {
		out.Message.Headers[wire.HeaderRoutes] = []any{partition.Slot(key)}
	}
	out.Exchange, out.Key = s.queue, ""
	return out
}

// missingExchange returns driver.ErrMissing if the exchange for this number of partitions is missing.
func (s *settings) missingExchange(conn *amqpconn.Conn) error {
	exists, err := conn.ExchangeExists(s.slotless())
	if err != nil {
		return fmt.Errorf("look for exchange %q: %w", s.slotless(), err)
	}
	if !exists {
		return fmt.Errorf("exchange %q, of %d partitions: declare it, or call Consumer.Setup: %w", s.slotless(), s.Partitions, driver.ErrMissing)
	}
	return nil
}

// slotOf returns the slot in a message's routes, or "". Other routes of a sender apply to the message, not to its
// copies.
func slotOf(headers amqp.Table) string {
	routes, _ := headers[wire.HeaderRoutes].([]any)
	for _, route := range routes {
		if name, ok := route.(string); ok && partition.IsSlot(name) {
			return name
		}
	}
	return ""
}
