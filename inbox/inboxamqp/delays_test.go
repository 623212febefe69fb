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
	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// One consumer declares 6 queues at most, and all together share 24 at most.
func TestSetup_declaresFewQueues(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	shared, own := 0, 0
	for _, queue := range []string{"a", "b", "c", "d"} {
		setUp(t, newConsumer(t, b.Dial, &recorder{}, config{Queue: queue, Classes: []string{"payment", "stock"}}))
		if shared, own = countQueues(t, b); shared > 24 || own > 6*int(queue[0]-'a'+1) {
			t.Errorf("after consumer %s: %d shared queues, %d others", queue, shared, own)
		}
	}
	t.Logf("four consumers with two classes each: %d shared queues, %d others", shared, own)
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

// Messages whose queue is gone when their time is up are kept in holdfast.lost, and those of other consumers
// return all the same: the broker holds back 32 messages of a delay queue that have no route.
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
}

// The messages that wait for a retry are counted apart from those that are put off, and neither when they are back.
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

// Check names a delivery limit that another one than Setup has declared, on queues of the consumer and of its dead
// letters, also where other arguments differ, and delay queues that differ in anything.
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
		"holdfast.delay.1000":    quorum(amqp.Table{"x-message-ttl": 999, "x-dead-letter-exchange": "holdfast.return"}),
	} {
		b.Queue(t, name, args)
	}
	for queue, want := range map[string][]string{
		"plain":   {`queue "plain" differs`, `queue "plain.failed.default" differs`},
		"foreign": nil,
	} {
		var got []string
		for _, found := range findings(t, afterSetup(t, b, config{Queue: queue})) {
			switch {
			case strings.Contains(found.Error(), "holdfast.delay.1000"):
			case strings.Contains(found.Error(), "x-delivery-limit") && strings.Contains(found.Mend(), "policy"):
				got = append(got, found.Error())
			default:
				t.Errorf("%s: finding %v, to mend by %s", queue, found, found.Mend())
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

// Check names the queues that older versions have declared, and those of others by no means.
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

// Check names the permission that is missing: to publish to the delay queues, or to compare arguments.
func TestCheck_namesMissingPermissions(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	afterSetup(t, b, config{})
	for name, tt := range map[string]struct {
		rights amqptest.Rights
		want   []string
	}{
		"run":    {amqptest.Rights{Read: ".*", Write: ".*"}, []string{"may not configure"}},
		"delays": {amqptest.Rights{Read: ".*", Write: "^orders", Configure: ".*"}, []string{`may not publish to exchange "holdfast.delay"`}},
		"setup":  {amqptest.Rights{Read: `^(orders|holdfast\.)`, Write: `^(amq\.default$|orders|holdfast\.)`, Configure: `^(orders|holdfast\.)`}, nil},
	} {
		user := b.User(t, name, tt.rights)
		c := newConsumer(t, user.Dial, &recorder{}, config{})
		if tt.want == nil {
			setUp(t, c)
		}
		found := findings(t, c)
		for _, want := range tt.want {
			if !slices.ContainsFunc(found, func(f mendable) bool { return strings.Contains(f.Error(), want) }) {
				t.Errorf("%s: findings %v, want one with %q", name, found, want)
			}
		}
		if tt.want == nil && len(found) > 0 {
			t.Errorf("%s: findings %v", name, found)
		}
	}
}

// A quorum queue of Setup keeps its messages, however often they are given back. The value of the limit is the same
// on all versions of RabbitMQ.
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
