package inboxamqp_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
)

// A consumer declares four queues, and one for each class. With partitions it declares one for each partition
// instead of the first queue, and one that counts processes. All consumers share 21 queues.
func TestSetup_declaresFewQueues(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	want := 0
	for _, tt := range []struct {
		cfg config
		own int
	}{
		{config{Queue: "a"}, 4},
		{config{Queue: "b", Classes: []string{"payment", "stock", "mail"}}, 7},
		{config{Queue: "c", Ordered: true, Partitions: 3}, 7},
		{config{Queue: "d", Ordered: true, Partitions: 3, Classes: []string{"payment"}}, 8},
	} {
		setUp(t, newConsumer(t, b.Dial, &recorder{}, tt.cfg))
		want += tt.own
		if shared, own := countQueues(t, b); shared != 21 || own != want {
			t.Errorf("after consumer %s: %d shared queues, %d others, want 21 and %d", tt.cfg.Queue, shared, own, want)
		}
	}
}

func countQueues(t *testing.T, b *amqptest.Broker) (shared, own int) {
	t.Helper()
	for name := range b.Queues(t) {
		if strings.HasPrefix(name, "holdfast.") {
			shared++
		} else {
			own++
		}
	}
	return shared, own
}

// A message whose queue no longer exists after its delay goes to holdfast.lost, and the messages of other
// consumers still return. Otherwise 32 messages without a route would block a delay queue.
func TestDelays_lostTargetBlocksNobody(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	got := &recorder{}
	consume(t, b, got, config{})
	setUp(t, newConsumer(t, b.Dial, &recorder{}, config{Queue: "gone"}))
	must(t, deleteQueue(t, b, "gone"))
	const lost = 40
	p := order()
	p.Headers = amqp.Table{"holdfast-delay": "100"}
	for range lost {
		b.Publish(t, "holdfast.delay", "gone", p)
	}
	b.Publish(t, "holdfast.delay", "orders", p)
	got.await(t, 1)
	awaitDepth(t, b, "holdfast.lost", lost)
	found := findings(t, newConsumer(t, b.Dial, &recorder{}, config{}))
	if want := fmt.Sprintf(`%d messages are in queue "holdfast.lost"`, lost); len(found) != 1 || !strings.Contains(found[0].Error(), want) {
		t.Errorf("findings %v, want %q", found, want)
	}
}

// If a queue was declared again without Setup, its retries return if the user may bind it. If the user may not,
// the retries are kept.
func TestDelays_queueDeclaredAgain(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		rights         amqptest.Rights
		returned, lost int
	}{
		"may bind":     {amqptest.Rights{Read: `^(orders.*|holdfast\.return)$`, Write: `^(orders.*|amq\.default|holdfast\.delay)$`, Configure: "^$"}, 1, 0},
		"may not bind": {amqptest.Rights{Read: `^orders`, Write: `^(amq\.default|holdfast\.delay)$`, Configure: "^$"}, 0, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := amqptest.New(t)
			setUp(t, newConsumer(t, b.Dial, &recorder{}, config{}))
			must(t, b.Channel(t).QueueUnbind("orders", "orders", "holdfast.return", nil)) // as for a new queue
			got := &recorder{}
			r := start(t, newConsumer(t, b.User(t, "run", tt.rights).Dial, got, config{}))
			ready(t, r)
			p := order()
			p.Headers = amqp.Table{"holdfast-delay": "100"}
			b.Publish(t, "holdfast.delay", "orders", p)
			got.await(t, tt.returned)
			awaitDepth(t, b, "holdfast.lost", tt.lost)
		})
	}
}

// Messages that wait for a retry and messages that were put off are counted separately, until they return.
func TestBacklog_countsRetriesAndPutOffApart(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	src := newSource(t, b.Dial, config{})
	s := open(t, src, 5)
	publishAll(t, b, "orders", "order.placed", 5)
	moves := later(time.Second, take(t, s, 5)...)
	moves[0].PutOff, moves[1].PutOff = true, true
	must(t, src.Move(t.Context(), moves)...)
	for _, m := range moves {
		must(t, s.Ack(t.Context(), []driver.Delivery{m.Delivery}, false))
	}
	counts := func(want driver.Backlog) {
		t.Helper()
		testenv.Eventually(t, func() error {
			got, err := src.(driver.Measured).Backlog(t.Context())
			if got != want {
				err = errors.Join(err, fmt.Errorf("%+v", got))
			}
			return err
		})
	}
	counts(driver.Backlog{Retrying: 3, PutOff: 2})
	must(t, s.Ack(t.Context(), take(t, s, 5), false))
	counts(driver.Backlog{})
}

// Check reports delivery limits that differ from Setup's, on the consumer's queues and dead-letter queues, even if
// other arguments differ too. It reports every difference of a delay queue.
func TestCheck_comparesArguments(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	quorum := func(args amqp.Table) amqp.Table {
		args["x-queue-type"] = "quorum"
		return args
	}
	for name, args := range map[string]amqp.Table{
		"plain":                  quorum(amqp.Table{}), // as declared on RabbitMQ 3 by older versions
		"plain.failed.default":   quorum(amqp.Table{"x-max-length": 100_000, "x-overflow": "reject-publish", "x-delivery-limit": 20}),
		"foreign":                quorum(amqp.Table{"x-delivery-limit": int64(2_000_000_000), "x-max-length": 100_000, "x-dead-letter-exchange": "amq.topic"}),
		"foreign.failed.default": {"x-queue-type": "classic", "x-max-priority": 3},
		"full":                   quorum(amqp.Table{"x-max-length": 100_000, "x-overflow": "reject-publish", "x-delivery-limit": int64(2_000_000_000)}),
		"classic":                {"x-max-length": 100_000, "x-overflow": "reject-publish-dlx", "x-dead-letter-exchange": "amq.topic"},
		"holdfast.delay.1000":    quorum(amqp.Table{"x-message-ttl": 999, "x-dead-letter-exchange": "holdfast.return"}),
	} {
		b.Queue(t, name, args)
	}
	for queue, want := range map[string][]string{
		"plain":   {`queue "plain" differs`, `queue "plain.failed.default" differs`},
		"foreign": nil,
		"full":    {`queue "full" differs`},
		"classic": {`queue "classic" differs`},
	} {
		var got []string
		for _, found := range findings(t, afterSetup(t, b, config{Queue: queue})) {
			switch {
			case strings.Contains(found.Error(), "holdfast.delay.1000"):
			case strings.Contains(found.Error(), "x-delivery-limit") && strings.Contains(found.Fix(), "policy"),
				strings.Contains(found.Error(), "x-overflow") && strings.Contains(found.Fix(), "accept all messages"):
				got = append(got, found.Error())
			default:
				t.Errorf("%s: finding %v, fix %s", queue, found, found.Fix())
			}
		}
		if !slices.EqualFunc(got, want, strings.Contains) {
			t.Errorf("%s: findings %q, want %q", queue, got, want)
		}
	}
	n := 0
	for _, found := range findings(t, afterSetup(t, b, config{Queue: "foreign"})) {
		if strings.Contains(found.Error(), "holdfast.delay.1000") {
			n++
		}
	}
	if n < 2 {
		t.Errorf("%d findings of a delay queue with another time and no delivery limit", n)
	}
}

// Check reports the queues of older versions, but not the queues of other consumers.
func TestCheck_namesOldQueues(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	old := []string{"failed.default", "failed.validation", "orders.failed.unrecoverable", "orders.retry.1200", "orders.retry.60000", "orders.retry.800"}
	for _, name := range slices.Concat(old, []string{"orders2.retry.800", "billing.failed.default"}) {
		b.Queue(t, name, nil)
	}
	found := findings(t, afterSetup(t, b, config{}))
	if want := "6 queues of an older version are left over: " + strings.Join(old, ", "); len(found) != 1 || !strings.Contains(found[0].Error(), want) {
		t.Errorf("findings %v, want %q", found, want)
	}
}

// Check reports each missing permission once for all queues: to publish to the delay queues, or to compare
// arguments.
func TestCheck_namesMissingPermissions(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	split := config{Queue: "split", Ordered: true, Partitions: 2}
	afterSetup(t, b, config{})
	afterSetup(t, b, split)
	for name, tt := range map[string]struct {
		rights amqptest.Rights
		want   []string
	}{
		"run":    {amqptest.Rights{Read: ".*", Write: ".*"}, []string{"may not configure"}},
		"split":  {amqptest.Rights{Read: ".*", Write: ".*"}, []string{"keeps no ledger", "may not configure", `exchange "split" was not compared`}},
		"delays": {amqptest.Rights{Read: ".*", Write: "^orders", Configure: ".*"}, []string{`may not publish to exchange "holdfast.delay"`}},
		"setup":  {amqptest.Rights{Read: `^(orders|holdfast\.)`, Write: `^(amq\.default$|orders|holdfast\.)`, Configure: `^(orders|holdfast\.)`}, nil},
	} {
		user := b.User(t, name, tt.rights)
		cfg := config{}
		if name == "split" {
			cfg = split
		}
		c := newConsumer(t, user.Dial, &recorder{}, cfg)
		if tt.want == nil {
			setUp(t, c)
		}
		found := findings(t, c)
		if !slices.EqualFunc(found, tt.want, func(f fixable, want string) bool { return strings.Contains(f.Error(), want) }) {
			t.Errorf("%s: findings %v, want %q", name, found, tt.want)
		}
	}
}

// Since 4.2.6 RabbitMQ hides names from a user without any permission on them. Check reports them in one finding;
// older versions answer, and the rest of Check is the same.
func TestCheck_namesHiddenByTheBroker(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	afterSetup(t, b, config{})
	user := b.User(t, "narrow", amqptest.Rights{Read: "^orders", Write: "^orders", Configure: "^$"})
	hidden := 0
	for _, f := range findings(t, newConsumer(t, user.Dial, &recorder{}, config{})) {
		switch text := f.Error(); {
		case strings.Contains(text, "the user has no permission on") && strings.Contains(text, "holdfast.lost"):
			hidden++
		case strings.Contains(text, "may not configure them"), strings.Contains(text, "may not publish to exchange"):
		default:
			t.Errorf("finding %v", f)
		}
	}
	if hidden > 1 {
		t.Errorf("%d findings of hidden names", hidden)
	}
}

// A user without the permissions of Setup may call it if nothing is missing, unless it has Bindings.
func TestSetup_withoutPermissions(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]config{
		"one queue":  {},
		"partitions": {Ordered: true, Partitions: 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := amqptest.New(t)
			user := b.User(t, "run", amqptest.Rights{Read: "^orders", Write: `^(amq\.default|holdfast\..*)$`, Configure: "^$"})
			declarer := b.User(t, "declares", amqptest.Rights{Read: "^$", Write: "^$", Configure: ".*"})
			fails := func(dial amqpconn.Dial, cfg config) {
				t.Helper()
				if err := newConsumer(t, dial, &recorder{}, cfg).Setup(t.Context()); err == nil || !strings.Contains(err.Error(), "ACCESS_REFUSED") {
					t.Errorf("Setup: %v", err)
				}
			}
			fails(user.Dial, cfg)
			fails(declarer.Dial, cfg)
			setUp(t, newConsumer(t, b.Dial, &recorder{}, cfg))
			setUp(t, newConsumer(t, user.Dial, &recorder{}, cfg))
			cfg.Bindings = []inboxamqp.Binding{{Exchange: "amq.topic", Key: "order.*"}}
			fails(user.Dial, cfg)
			must(t, deleteQueue(t, b, "orders.retrying"))
			cfg.Bindings = nil
			fails(user.Dial, cfg)
		})
	}
}

// A quorum queue declared by Setup keeps its messages, however often they are returned. The limit is the same on
// all versions of RabbitMQ.
func TestSetup_deliveryLimitOfAllQueues(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	src := newSource(t, b.Dial, config{})
	numbered(t, b, "orders", 1, 1)
	s := open(t, src, 1)
	for range 25 { // RabbitMQ 4 drops it after 20 by default
		must(t, s.GiveBack(t.Context(), take(t, s, 1)))
	}
	must(t, s.Ack(t.Context(), take(t, s, 1), false))
	for name, args := range b.Queues(t) {
		if limit, _ := args["x-delivery-limit"].(float64); limit != 1e9 {
			t.Errorf("queue %s has the delivery limit %v", name, args["x-delivery-limit"])
		}
	}
}
