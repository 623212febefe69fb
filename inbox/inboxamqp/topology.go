package inboxamqp

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/partition"
	"github.com/holdfast-go/holdfast/internal/wire"
)

// Queues.
//
// Setup declares four queues for a consumer of "billing", and one more for each of ConsumerConfig.Classes. With
// Queue.Partitions it declares a queue for each partition instead of the first one, and billing.members:
//
//	billing                 its messages
//	billing.failed.default  its dead letters, of all classes that are not in ConsumerConfig.Classes
//	billing.retrying        one empty message for each message that waits for its next attempt
//	billing.putoff          one empty message for each message that waits and has not failed
//
// All consumers of a virtual host share 20 delay queues, holdfast.delay.100 to holdfast.delay.960000, the queue
// holdfast.lost, and the exchanges holdfast.delay, holdfast.return and holdfast.lost. A message that must wait
// goes to the exchange holdfast.delay. Its routing key is the name of its queue. Its header holdfast-delay
// contains the delay in milliseconds and selects the delay queue. After the delay it returns to its queue through
// holdfast.return. If its queue no longer exists, it goes to holdfast.lost, so that it does not block other
// messages. Watch holdfast.lost; Check reports its messages. When the queue exists again, move them to the
// exchange holdfast.return with a shovel.
//
// A consumer's queue must not reject messages: do not declare it with x-overflow reject-publish, and do not set
// such a policy. A delay queue keeps the messages that their queue rejects. Some dozens of them block the retries
// of all consumers of the virtual host. Check reports a queue that was declared so; it cannot see policies. An
// unavailable queue, such as a classic queue on a stopped node, has the same effect.
//
// Run binds its queue to holdfast.return in each session, in case the queue was deleted and declared again without
// Setup. If it lacks the permission, it logs that, and you must call Setup.
//
// All queues are quorum queues, except that Queue.Classic makes the consumer's own queues classic. Delay queues
// dead-letter at least once. Every quorum queue has x-delivery-limit 1,000,000,000, on all versions of RabbitMQ.
// Without a limit, RabbitMQ 4 drops messages that were returned 20 times. That includes dead letters, because each
// scan returns them. A queue declared without the limit, for example by an older version of this package, needs a
// policy with the same delivery-limit before the broker is upgraded to RabbitMQ 4. Check reports such queues.
//
// Setup needs permission to configure, write and read holdfast\..* and the consumer's own names, and to read the
// exchanges of Queue.Bindings. Without these permissions Setup succeeds only if everything exists and
// Queue.Bindings is empty. RabbitMQ 4.2.6 and later report whether a name exists only to users with some permission
// on it, so Setup and Check then need write on holdfast\..*. Run needs to read the consumer's queues and to write
// to amq.default and holdfast.delay. To bind its queue, Run needs to write to the queue and to read holdfast.return.

// Retries.
//
// A delay queue waits for 0.1, 0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48 or 64 seconds, or for 2, 4, 8
// or 16 minutes. A message takes the shortest sufficient delay. So it is never early, and at most half of its
// delay plus 1.5 seconds late. If one delay queue would make it later than that, and for longer delays, the
// message passes through several delay queues, and through its own queue between them. The header holdfast-attempt
// contains the attempt. Later messages overtake a failed message.
//
// If the broker stops while it returns a message from a delay queue, it tries again after three minutes, so that
// retry is late. The broker's setting dead_letter_worker_publisher_confirm_timeout (advanced.config, application
// rabbit, in milliseconds) shortens the three minutes.

// The queue types, as values of the argument x-queue-type.
const (
	quorum  = "quorum"
	classic = "classic"
)

// singleActive is the argument that makes a queue serve one consumer at a time.
const singleActive = "x-single-active-consumer"

// unlimited is a delivery limit that no message reaches. A quorum queue drops a message that was returned more
// often than its limit. On RabbitMQ 4 the default limit is 20. All versions accept this value. The value -1 means
// no limit on RabbitMQ 4, but older versions then drop messages at once.
const unlimited = 1_000_000_000

// queueSpec describes a queue that the consumer needs.
type queueSpec struct {
	name string
	kind string // quorum or classic
	use  use
	args amqp.Table
}

// use is the purpose of a queue. It decides which arguments Check compares.
type use int

const (
	own    use = iota + 1 // the consumer reads it
	dead                  // it contains dead letters
	noted                 // it contains counters of waiting messages
	shared                // all consumers of the vhost share it
)

// table returns all arguments of the queue.
func (q queueSpec) table(kind string) amqp.Table {
	args := maps.Clone(q.args)
	args["x-queue-type"] = kind
	if kind == quorum {
		args["x-delivery-limit"] = int64(unlimited)
	}
	return args
}

func (q queueSpec) declare(ch *amqp.Channel) error {
	_, err := ch.QueueDeclare(q.name, true, false, false, false, q.table(q.kind))
	return err
}

// queueType is the type of the consumer's own queues.
func (s *settings) queueType() string {
	if s.Classic {
		return classic
	}
	return quorum
}

// queues returns all queues that the consumer needs, its own first.
func (s *settings) queues() []queueSpec {
	specs := s.ownQueues()
	for _, class := range s.places() {
		specs = append(specs, queueSpec{driver.DeadLetterQueue(s.DeadLetterPrefix, class), s.queueType(), dead, amqp.Table{}})
	}
	return slices.Concat(specs, s.noteQueues(), sharedQueues())
}

// read returns the names of the queues that the consumer reads.
func (s *settings) read() []string {
	if s.partitioned() {
		return partition.Names(s.queue, s.Partitions)
	}
	return []string{s.queue}
}

// ownQueues returns the queues that the consumer reads, and the queue that counts processes.
func (s *settings) ownQueues() (specs []queueSpec) {
	for _, name := range s.read() {
		args := amqp.Table{}
		if s.Ordered {
			args[singleActive] = true
		}
		specs = append(specs, queueSpec{name, s.queueType(), own, args})
	}
	if s.partitioned() {
		specs = append(specs, queueSpec{s.members(), s.queueType(), own, amqp.Table{}})
	}
	return specs
}

// Setup declares everything that is missing: the queue or its partitions, the dead-letter queues, the queues and
// exchanges that all consumers of the vhost share, and the exchanges of Queue.Bindings. Then it makes the
// bindings. Everything is durable; the exchanges of the bindings are topic exchanges. Existing queues are used as
// they are. Setup may be called repeatedly, by several processes at once, before or after the Setup of a publisher
// to the same exchange. "Queues" in the package's doc lists the names and permissions.
//
// With Queue.Partitions, Setup fails if queues or exchanges of another number of partitions exist, because those
// still receive messages. See "Partitions" in the package's doc.
//
// A user without the permissions may call Setup if all queues and exchanges exist. Setup then assumes the bindings
// between them, which AMQP cannot list. The bindings of Queue.Bindings always need the permissions.
func (c *Consumer) Setup(ctx context.Context) error {
	if err := amqpconn.Use(ctx, c.source.dial, c.cfg.Timeout, c.cfg.setUp); err != nil {
		return fmt.Errorf("inboxamqp: setup: %w", err)
	}
	return nil
}

func (s *settings) setUp(conn *amqpconn.Conn) error {
	made, err := s.declareAll(conn)
	if err != nil {
		return err
	}
	for _, bind := range [...]func(*amqpconn.Conn) error{s.bindShared, s.bindPartitions} {
		if err := bind(conn); err != nil && (made || !amqpconn.IsRefused(err)) {
			return err
		}
	}
	for _, b := range s.Bindings {
		if _, err := declareExchange(conn, b.Exchange); err != nil {
			return fmt.Errorf("exchange %q: %w", b.Exchange, err)
		}
		if err := s.bind(conn, b); err != nil {
			return fmt.Errorf("binding to exchange %q by %q: %w", b.Exchange, b.Key, err)
		}
	}
	return nil
}

// declareAll declares the consumer's exchanges, the shared exchanges and the queues. It reports whether anything
// was missing.
func (s *settings) declareAll(conn *amqpconn.Conn) (made bool, err error) {
	slots, err := s.declareSlots(conn)
	if err != nil {
		return false, err
	}
	exchanges, err := declareShared(conn)
	if err != nil {
		return false, err
	}
	made = slots || exchanges
	for _, spec := range s.queues() {
		one, err := declareQueue(conn, spec)
		if err != nil {
			return false, fmt.Errorf("queue %q: %w", spec.name, err)
		}
		made = made || one
	}
	return made, nil
}

func declareQueue(conn *amqpconn.Conn, spec queueSpec) (made bool, err error) {
	return declare(func() (bool, error) { return conn.QueueExists(spec.name) }, func() error { return conn.Try(spec.declare) })
}

func declareExchange(conn *amqpconn.Conn, name string) (made bool, err error) {
	return declare(func() (bool, error) { return conn.ExchangeExists(name) }, func() error {
		return conn.Try(func(ch *amqp.Channel) error {
			return ch.ExchangeDeclare(name, amqp.ExchangeTopic, true, false, false, false, nil)
		})
	})
}

// declare creates something that does not exist. If another process creates it meanwhile, with other arguments,
// that process wins.
func declare(exists func() (bool, error), create func() error) (made bool, err error) {
	if there, err := exists(); there || err != nil {
		return false, err
	}
	err = create()
	if err == nil {
		return true, nil
	}
	if there, _ := exists(); there {
		return true, nil
	}
	return false, err
}

// declareSame declares an exchange even if it exists, so that the broker compares the settings. If it exists, a
// user without the permission to declare it gets no error.
func declareSame(conn *amqpconn.Conn, name string, create func(*amqp.Channel) error) (made bool, err error) {
	exists, err := conn.ExchangeExists(name)
	if err != nil {
		return false, err
	}
	err = conn.Try(create)
	if exists && amqpconn.IsRefused(err) {
		err = nil
	}
	return !exists, err
}

// All consumers of a vhost share the delay queues. A message enters through the headers exchange holdfast.delay.
// Its header holdfast-delay selects the delay queue; its routing key is the name of the queue to return to. After
// the delay, the delay queue sends it to the direct exchange holdfast.return. Every consumer has bound its queue
// there by name. A message whose queue no longer exists goes to the queue holdfast.lost. Without a route it would
// stay in the delay queue, and some dozens of such messages would block the delay queue for all consumers.
const (
	sharedPrefix   = "holdfast."
	delayExchange  = sharedPrefix + "delay"
	returnExchange = sharedPrefix + "return"
	lostName       = sharedPrefix + "lost" // an exchange and its queue
)

// ladder lists the delays of the delay queues. A longer delay passes through several delay queues.
var ladder = [...]time.Duration{
	100 * time.Millisecond, 250 * time.Millisecond, 500 * time.Millisecond,
	time.Second, 1500 * time.Millisecond, 2 * time.Second, 3 * time.Second, 4 * time.Second, 6 * time.Second, 8 * time.Second,
	12 * time.Second, 16 * time.Second, 24 * time.Second, 32 * time.Second, 48 * time.Second, 64 * time.Second,
	2 * time.Minute, 4 * time.Minute, 8 * time.Minute, 16 * time.Minute,
}

// cover returns the step of the ladder for a delay of d, and the rest of the delay after that step. It chooses the
// shortest step of at least d. If that step is longer than 1.5 times d plus 1.5 s, or there is none, it chooses
// the longest step below d.
func cover(d time.Duration) (step, rest time.Duration) {
	for i, step := range ladder {
		switch {
		case step < d:
		case i == 0 || step <= d+d/2+1500*time.Millisecond:
			return step, 0
		default:
			return ladder[i-1], d - ladder[i-1]
		}
	}
	longest := ladder[len(ladder)-1]
	return longest, d - longest
}

// delayValue returns the header value that selects the delay queue of a step.
func delayValue(step time.Duration) string { return strconv.FormatInt(step.Milliseconds(), 10) }

func delayQueue(step time.Duration) string { return delayExchange + "." + delayValue(step) }

// sharedQueues returns the queues that all consumers of a vhost share. They are quorum queues even with
// Queue.Classic, because other consumers may need quorum queues.
func sharedQueues() []queueSpec {
	specs := []queueSpec{{name: lostName, kind: quorum, use: shared, args: amqp.Table{}}}
	for _, step := range ladder {
		specs = append(specs, queueSpec{name: delayQueue(step), kind: quorum, use: shared, args: amqp.Table{
			"x-message-ttl":          step.Milliseconds(),
			"x-dead-letter-exchange": returnExchange,
			"x-dead-letter-strategy": "at-least-once", // the message stays until the queue it returns to has accepted it
			"x-overflow":             "reject-publish",
		}})
	}
	return specs
}

// sharedExchange describes an exchange that all consumers of a vhost share.
type sharedExchange struct {
	name, kind string
	args       amqp.Table
}

var sharedExchanges = [...]sharedExchange{
	{lostName, amqp.ExchangeFanout, nil},
	{returnExchange, amqp.ExchangeDirect, amqp.Table{"alternate-exchange": lostName}},
	{delayExchange, amqp.ExchangeHeaders, nil},
}

func (e sharedExchange) declare(ch *amqp.Channel) error {
	return ch.ExchangeDeclare(e.name, e.kind, true, false, false, false, e.args)
}

// declareShared declares the shared exchanges.
func declareShared(conn *amqpconn.Conn) (made bool, err error) {
	for _, e := range sharedExchanges {
		one, err := declareSame(conn, e.name, e.declare)
		if err != nil {
			return made, fmt.Errorf("exchange %q: %w", e.name, err)
		}
		made = made || one
	}
	return made, nil
}

// bindShared binds the consumer's own queues to the exchange of returning messages, and binds the shared queues.
func (s *settings) bindShared(conn *amqpconn.Conn) error {
	for _, name := range s.read() {
		if err := bindReturn(conn, name); err != nil {
			return err
		}
	}
	return conn.Try(func(ch *amqp.Channel) error {
		if err := ch.QueueBind(lostName, "", lostName, false, nil); err != nil {
			return fmt.Errorf("binding of queue %q: %w", lostName, err)
		}
		for _, step := range ladder {
			args := amqp.Table{"x-match": "all", wire.HeaderDelay: delayValue(step)}
			if err := ch.QueueBind(delayQueue(step), "", delayExchange, false, args); err != nil {
				return fmt.Errorf("binding of queue %q: %w", delayQueue(step), err)
			}
		}
		return nil
	})
}

// bindReturn binds a queue to the exchange of returning messages.
func bindReturn(conn *amqpconn.Conn, queue string) error {
	return bindQueue(conn, queue, queue, returnExchange)
}

// toWait returns a copy that waits for a delay and then goes to a queue.
func (s *settings) toWait(queue string, copied amqp.Publishing, delay time.Duration, putOff bool) *outgoing {
	step, rest := cover(delay)
	setWait(copied, rest)
	copied.Headers[wire.HeaderDelay], copied.Headers[wire.HeaderDue] = delayValue(step), timeText(time.Now().Add(delay))
	set(copied.Headers, wire.HeaderPutOff, "true", putOff)
	return &outgoing{exchange: delayExchange, key: queue, copied: copied, note: s.noteQueue(putOff)}
}
