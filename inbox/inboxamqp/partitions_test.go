package inboxamqp_test

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
	"github.com/holdfast-go/holdfast/internal/partition"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
)

func TestPartitionsConfig(t *testing.T) {
	t.Parallel()
	key := func(*inbox.Message) string { return "" }
	for want, cfg := range map[string]struct {
		Partitions     int
		ConsumerConfig inbox.ConsumerConfig
		Bindings       []inboxamqp.Binding
	}{
		"needs ConsumerConfig.Ordered": {Partitions: 2},
		"which Setup declares":         {Partitions: 2, ConsumerConfig: inbox.ConsumerConfig{Ordered: true}, Bindings: []inboxamqp.Binding{{Exchange: "orders", Key: "#"}}},
		"65 is not from 0 to":          {Partitions: 65, ConsumerConfig: inbox.ConsumerConfig{Ordered: true}},
		"-1 is not from 0 to":          {Partitions: -1, ConsumerConfig: inbox.ConsumerConfig{Ordered: true}},
		"excludes ConsumerConfig.Key":  {Partitions: 2, ConsumerConfig: inbox.ConsumerConfig{Ordered: true, Key: key}},
		"excludes ConsumerConfig.Park": {Partitions: 2, ConsumerConfig: inbox.ConsumerConfig{Ordered: true, ParkKeys: true}},
	} {
		_, err := inboxamqp.NewConsumer(inboxamqp.Dial("amqp://127.0.0.1:1", amqp.Config{}), inboxamqp.Queue{Name: "orders", Partitions: cfg.Partitions, Bindings: cfg.Bindings}, &recorder{}, cfg.ConsumerConfig)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	for _, n := range []int{0, 1} {
		if _, err := inboxamqp.NewConsumer(inboxamqp.Dial("amqp://127.0.0.1:1", amqp.Config{}), inboxamqp.Queue{Name: "orders", Partitions: n}, &recorder{}, inbox.ConsumerConfig{}); err != nil {
			t.Error(err)
		}
	}
}

// This tests the parts that only RabbitMQ's partitions have; conformance.TestPartitions tests the rest.
func TestPartitions_topology(t *testing.T) {
	t.Parallel()
	testenv.AMQPURL(t) // skips before there are subtests
	for name, test := range map[string]func(*testing.T, *amqptest.Broker){
		"setup":      testPartitionsSetup,
		"leftovers":  testPartitionsLeftovers,
		"slots":      testPartitionsSlots,
		"long waits": testPartitionsWait,
		"missing":    testPartitionsMissing,
		"number":     testPartitionsNumber,
		"split":      testPartitionsSplit,
		"logged":     testPartitionsLogged,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, amqptest.New(t))
		})
	}
}

// partitioned returns the config of a consumer with four partitions. Classic queues are declared faster.
func partitioned() config {
	return config{
		Ordered: true, Classic: true, Partitions: 4, Retry: quick, Ledger: memory.NewLedger(), Leveling: 300 * time.Millisecond,
		Bindings: []inboxamqp.Binding{{Exchange: "shop", Key: "order.*"}, {Exchange: "shop", Key: "#"}},
	}
}

// keyed returns a message of a key in the form of outboxamqp.
func keyed(key string) amqp.Publishing {
	p := order()
	p.Headers = amqp.Table{"holdfast-key": key, "CC": []any{partition.Slot(key)}}
	return p
}

// A slot selects the partition. Messages without a slot go to the first partition.
func testPartitionsSlots(t *testing.T, b *amqptest.Broker) {
	got := &recorder{}
	consume(t, b, got, partitioned())
	want := map[string]string{}
	for name, slot := range map[string]any{
		"orders.0": "holdfast.slot.0", "orders.1": "holdfast.slot.17", "orders.2": "holdfast.slot.62", "orders.3": "holdfast.slot.63",
	} {
		p := order()
		p.Headers = amqp.Table{"CC": []any{"order.other", slot}}
		b.Publish(t, "shop", "order.placed", p)
		want[p.MessageId] = name
	}
	for _, headers := range []amqp.Table{nil, {"other": "header"}, {"holdfast-key": "of another sender"}, {"CC": []any{}}, {"CC": []any{"holdfast.slot.64", "orders.2"}}} {
		p := order()
		p.Headers = headers
		b.Publish(t, "shop", "order.placed", p)
		want[p.MessageId] = "orders.0"
	}
	for _, m := range got.await(t, len(want)) {
		if queue := want[m.ID.String()]; m.Queue != queue {
			t.Errorf("a message is in %s, not in %s", m.Queue, queue)
		}
	}
}

// Messages with a long delay leave their partition, and return to it.
func testPartitionsWait(t *testing.T, b *amqptest.Broker) {
	cfg := partitioned()
	afterSetup(t, b, cfg)
	const keys = 8
	for k := range keys {
		p := keyed(fmt.Sprint("k", k))
		p.Headers["holdfast-wait"] = "600" // after its first delay
		p.Headers["holdfast-delay"] = "100"
		b.Publish(t, "holdfast.delay", fmt.Sprint("orders.", k%cfg.Partitions), p)
	}
	got := &recorder{}
	start(t, newConsumer(t, b.Dial, got, cfg))
	for _, m := range got.await(t, keys) {
		if want := fmt.Sprint("orders.", m.Key[1]%byte(cfg.Partitions)); m.Queue != want {
			t.Errorf("a message of %s came back to %s, not to %s", m.Key, m.Queue, want)
		}
	}
}

// publish publishes messages of several keys to the exchange, numbered from first on.
func publish(t *testing.T, b *amqptest.Broker, keys, first, each int) {
	t.Helper()
	ch := b.Channel(t)
	must(t, ch.Confirm(false))
	var last *amqp.DeferredConfirmation
	for n := first; n < first+each; n++ {
		for k := range keys {
			p := keyed(fmt.Sprint("k", k))
			p.Body = fmt.Append(nil, n)
			var err error
			last, err = ch.PublishWithDeferredConfirm("shop", "order.placed", true, false, p)
			must(t, err)
		}
	}
	if ok, err := last.WaitContext(t.Context()); err != nil || !ok {
		t.Fatalf("not confirmed: %v", err)
	}
}

func wantFinding(t *testing.T, c *inboxamqp.Consumer, text string) {
	t.Helper()
	all := findings(t, c)
	for _, found := range all {
		if strings.Contains(found.Error(), text) {
			return
		}
	}
	t.Errorf("no finding about %q: %v", text, all)
}

func testPartitionsSetup(t *testing.T, b *amqptest.Broker) {
	c := newConsumer(t, b.Dial, &recorder{}, partitioned())
	b.Exchange(t, "orders", "topic")
	wantFinding(t, c, "does not match 4 partitions")
	if err := c.Setup(t.Context()); err == nil || !strings.Contains(err.Error(), `exchange "orders"`) {
		t.Errorf("Setup over an exchange of another type: %v", err)
	}
	wantFinding(t, c, "orders.3") // nothing was declared
	must(t, b.Channel(t).ExchangeDelete("orders", false, false))
	var all sync.WaitGroup
	for range 3 {
		all.Go(func() {
			if err := c.Setup(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if found := findings(t, c); found != nil {
		t.Error(found)
	}
	must(t, b.Channel(t).ExchangeDelete("orders.slotless.4", false, false))
	wantFinding(t, c, `exchange "orders.slotless.4" does not exist`)
	must(t, b.Channel(t).ExchangeDelete("orders", false, false))
	wantFinding(t, c, `exchange "orders" does not exist`)
}

// Check reports queues of another number of partitions, and Setup changes nothing.
func testPartitionsLeftovers(t *testing.T, b *amqptest.Broker) {
	one := partitioned()
	one.Partitions = 0
	afterSetup(t, b, one)
	four := newConsumer(t, b.Dial, &recorder{}, partitioned())
	wantLeftover(t, four, "orders")
	must(t, deleteQueue(t, b, "orders"), four.Setup(t.Context()))
	fewer := partitioned()
	fewer.Partitions = 2
	wantLeftover(t, newConsumer(t, b.Dial, &recorder{}, fewer), "orders.2")
	more := partitioned()
	more.Partitions = 8
	eight := newConsumer(t, b.Dial, &recorder{}, more)
	if err := eight.Setup(t.Context()); err == nil || !strings.Contains(err.Error(), `exchange "orders"`) {
		t.Errorf("Setup of more partitions: %v", err)
	}
	wantFinding(t, eight, "orders.7") // nothing was declared
	wantLeftover(t, newConsumer(t, b.Dial, &recorder{}, one), "orders.members")
	must(t, deleteQueue(t, b, "orders.2")) // one of several
	wantLeftover(t, newConsumer(t, b.Dial, &recorder{}, fewer), "orders.3")
}

func wantLeftover(t *testing.T, c *inboxamqp.Consumer, queue string) {
	t.Helper()
	if err := c.Setup(t.Context()); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("%q", queue)) {
		t.Errorf("Setup: %v", err)
	}
	wantFinding(t, c, fmt.Sprintf("queue %q", queue))
}

// Ready names a missing partition, and the consumer continues after it is declared again.
func testPartitionsMissing(t *testing.T, b *amqptest.Broker) {
	got := &recorder{}
	c := consume(t, b, got, partitioned())
	must(t, deleteQueue(t, b, "orders.2"))
	awaitMissing(t, c, "orders.2")
	ch := b.Channel(t)
	returned := ch.NotifyReturn(make(chan amqp.Return, 1))
	lost := keyed("k4") // it is in orders.2
	must(t, ch.Publish("shop", "order.placed", true, false, lost))
	select {
	case r := <-returned: // and does not go to the first partition
		if r.MessageId != lost.MessageId {
			t.Errorf("returned: %+v", r)
		}
	case <-time.After(testenv.Patience):
		t.Error("a message of a missing partition has a route")
	}
	must(t, c.Setup(t.Context()))
	ready(t, c)
	publish(t, b, 16, 0, 1)
	got.distinct(t, 16)
}

func awaitMissing(t *testing.T, c *running, name string) {
	t.Helper()
	testenv.Eventually(t, func() error {
		if err := c.Ready(t.Context()); !errors.Is(err, driver.ErrMissing) || !strings.Contains(err.Error(), name) {
			return fmt.Errorf("ready: %w", err)
		}
		return nil
	})
}

// A process with another number of partitions returns an error, and receives no messages.
func testPartitionsNumber(t *testing.T, b *amqptest.Broker) {
	afterSetup(t, b, partitioned())
	fewer := partitioned()
	fewer.Partitions = 2
	awaitMissing(t, start(t, newConsumer(t, b.Dial, &recorder{}, fewer)), "orders.slotless.2")
}

// Dead letters of the queue before it was partitioned return to the partitions of their keys.
func testPartitionsSplit(t *testing.T, b *amqptest.Broker) {
	got := &recorder{}
	c := consume(t, b, got, partitioned())
	for k := range 8 {
		p := keyed(fmt.Sprint("k", k))
		origin := []string{"orders", "orders.17"}[k%2] // the whole queue, and a partition of a larger number
		p.Headers["holdfast-origin-queue"], p.Headers["holdfast-failure-class"] = origin, "validation"
		if k%2 == 0 {
			delete(p.Headers, "CC") // from another sender
		}
		b.Publish(t, "", "orders.failed.default", p)
	}
	if n, err := c.DeadLetters().Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "test"}); n.Returned != 8 || err != nil {
		t.Fatalf("%+v, %v", n, err)
	}
	for _, m := range got.await(t, 8) {
		if want := fmt.Sprint("orders.", partition.Of(m.Key, "", partition.Slots)%4); m.Queue != want {
			t.Errorf("a dead letter of %s came back in %s, not in %s", m.Key, m.Queue, want)
		}
	}
}

// Logs of failures and of dead letters name the partition.
func testPartitionsLogged(t *testing.T, b *amqptest.Broker) {
	var log logBuffer
	cfg := partitioned()
	cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
	got := &recorder{fail: func(*inbox.Message) error { return inbox.Invalid(errBroken) }}
	consume(t, b, got, cfg)
	b.Publish(t, "shop", "order.placed", keyed("a"))
	m := got.await(t, 1)[0]
	testenv.Eventually(t, func() error {
		if text := log.String(); !strings.Contains(text, "message not processed") || !strings.Contains(text, "queue="+m.Queue) {
			return fmt.Errorf("log: %s", text)
		}
		return nil
	})
}
