package inboxamqp_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/partition"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestPartitionsConfig(t *testing.T) {
	t.Parallel()
	key := func(*inbox.Message) string { return "" }
	for want, cfg := range map[string]inboxamqp.Config{
		"needs Ordered":        {Partitions: 2},
		"puts before":          {Partitions: 2, ConsumerConfig: inbox.ConsumerConfig{Ordered: true}, Bindings: []inboxamqp.Binding{{Exchange: "orders", Key: "#"}}},
		"65 is not from 0 to":  {Partitions: 65, ConsumerConfig: inbox.ConsumerConfig{Ordered: true}},
		"-1 is not from 0 to":  {Partitions: -1, ConsumerConfig: inbox.ConsumerConfig{Ordered: true}},
		"excludes Config.Key":  {Partitions: 2, ConsumerConfig: inbox.ConsumerConfig{Ordered: true, Key: key}},
		"excludes Config.Park": {Partitions: 2, ConsumerConfig: inbox.ConsumerConfig{Ordered: true, ParkKeys: true}},
	} {
		_, err := inboxamqp.NewConsumer(inboxamqp.Dial("amqp://127.0.0.1:1", amqp.Config{}), "orders", &recorder{}, cfg)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	for _, n := range []int{0, 1} {
		if _, err := inboxamqp.NewConsumer(inboxamqp.Dial("amqp://127.0.0.1:1", amqp.Config{}), "orders", &recorder{}, inboxamqp.Config{Partitions: n}); err != nil {
			t.Error(err)
		}
	}
}

// The tests share a broker of their own.
func TestPartitions(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.RabbitMQ)
	t.Run("restart", func(t *testing.T) { testPartitionsRestart(t, server) }) // before the others: it is the whole broker's
	for name, test := range map[string]func(*testing.T, *amqptest.Broker){
		"setup":        testPartitionsSetup,
		"leftovers":    testPartitionsLeftovers,
		"order":        testPartitionsOrder,
		"share":        testPartitionsShare,
		"slots":        testPartitionsSlots,
		"long waits":   testPartitionsWait,
		"dead letters": testPartitionsDeadLetters,
		"limit":        testPartitionsLimit,
		"network":      testPartitionsNetwork,
		"missing":      testPartitionsMissing,
		"number":       testPartitionsNumber,
		"split":        testPartitionsSplit,
		"logged":       testPartitionsLogged,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, amqptest.On(t, server.URL(), server.AdminURL()))
		})
	}
	t.Run("consumer", func(t *testing.T) {
		t.Parallel()
		conformance.TestConsumer(t, conformance.ConsumerBackend{Ordered: true, Partitioned: true, New: func(t *testing.T) conformance.ConsumerFixture {
			return newConsumerFixture(t, amqptest.On(t, server.URL(), server.AdminURL()), config{Ordered: true, Partitions: 3, Leveling: 300 * time.Millisecond})
		}})
	})
	t.Run("source", func(t *testing.T) {
		t.Parallel()
		conformance.TestSource(t, conformance.SourceBackend{New: func(t *testing.T) conformance.SourceFixture {
			f, _ := newSourceFixture(t, amqptest.On(t, server.URL(), server.AdminURL()), config{Ordered: true, Partitions: 3})
			return f
		}})
	})
}

// partitioned is a consumer of four partitions that forgets nothing.
func partitioned() config {
	return config{
		Ordered: true, Partitions: 4, Retry: quick, Ledger: memory.NewLedger(), Leveling: 300 * time.Millisecond,
		Bindings: []inboxamqp.Binding{{Exchange: "shop", Key: "order.*"}, {Exchange: "shop", Key: "#"}},
	}
}

// keyed is a message of a key, as outboxamqp sends it.
func keyed(key string) amqp.Publishing {
	p := order()
	p.Headers = amqp.Table{"holdfast-key": key, "CC": []any{partition.Slot(key)}}
	return p
}

// A key has its partition for good: an exchange that goes by a ring of hashes makes a new one when its
// broker starts again, and later messages of a key overtake those that are queued.
func testPartitionsRestart(t *testing.T, server *testenv.Server) {
	const keys = 64
	b := amqptest.On(t, server.URL(), server.AdminURL())
	cfg := partitioned()
	cfg.Partitions = 12 // with those of more than one digit the broker's order is not that of the numbers
	afterSetup(t, b, cfg)
	publish(t, b, keys, 0, 1)
	must(t, server.Restart(t.Context()))
	publish(t, b, keys, 1, 1)
	got := &recorder{}
	start(t, newConsumer(t, b.Dial, got, cfg))
	was := map[string]string{}
	for _, m := range got.await(t, 2*keys) {
		if was[m.Key] == "" {
			was[m.Key] = m.Queue
		}
		if m.Queue != was[m.Key] {
			t.Errorf("a message of %s is in %s, and one after the restart in %s", m.Key, was[m.Key], m.Queue)
		}
	}
}

// Two processes share the partitions, one of them ends and starts anew in between, and messages
// fail: each key keeps its order, and each message takes effect once.
func testPartitionsOrder(t *testing.T, b *amqptest.Broker) {
	const keys, each = 16, 240
	cfg := partitioned()
	cfg.Retry.MaxAttempts = 100
	s := newShop(0.05)
	afterSetup(t, b, cfg)
	publish(t, b, keys, 0, each/2)
	one := start(t, newConsumer(t, b.Dial, s.process(1), cfg))
	start(t, newConsumer(t, b.Dial, s.process(2), cfg))
	s.await(t, keys*each/8)
	one.stop(t)
	one = start(t, newConsumer(t, b.Dial, s.process(3), cfg))
	publish(t, b, keys, each/2, each/2)
	s.await(t, keys*each)
	sent := each
	testenv.Eventually(t, func() error { // a process may get its share when the rest is done
		for process := 2; process <= 3; process++ {
			if s.queues(process) == 0 {
				publish(t, b, keys, sent, 4)
				sent += 4
				s.await(t, keys*sent)
				return fmt.Errorf("process %d had nothing to do", process)
			}
		}
		return nil
	})
	s.check(t, keys, sent)
	ready(t, one)
}

// A process that comes later gets its share of the partitions, and the first one keeps its own.
func testPartitionsShare(t *testing.T, b *amqptest.Broker) {
	const keys = 32
	cfg := partitioned()
	afterSetup(t, b, cfg)
	s := newShop(0)
	sent := 0
	more := func() {
		publish(t, b, keys, sent, 4)
		sent += 4
		s.await(t, keys*sent)
	}
	start(t, newConsumer(t, b.Dial, s.process(1), cfg))
	more()
	if n := s.queues(1); n != 4 {
		t.Fatalf("alone it serves %d partitions", n)
	}
	two := start(t, newConsumer(t, b.Dial, s.process(2), cfg))
	testenv.Eventually(t, func() error {
		more()
		if a, b := s.queues(1), s.queues(2); a != 2 || b != 2 {
			return fmt.Errorf("%d and %d partitions", a, b)
		}
		return nil
	})
	two.stop(t)
	more()
	if n := s.queues(1); n != 4 {
		t.Errorf("alone again it serves %d partitions", n)
	}
	s.check(t, keys, sent)
}

// A slot says which partition. Whatever has none is in the first one.
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

// Messages that are to wait for long leave their partition, and come back to it.
func testPartitionsWait(t *testing.T, b *amqptest.Broker) {
	cfg := partitioned()
	afterSetup(t, b, cfg)
	const keys = 8
	for k := range keys {
		p := keyed(fmt.Sprint("k", k))
		p.Headers["holdfast-wait"] = "600" // more than any retry queue holds
		b.Publish(t, "", "orders.retry.100", p)
	}
	got := &recorder{}
	start(t, newConsumer(t, b.Dial, got, cfg))
	for _, m := range got.await(t, keys) {
		if want := fmt.Sprint("orders.", partition.Of(m.Key, "", partition.Slots)%cfg.Partitions); m.Queue != want {
			t.Errorf("a message of %s came back to %s, not to %s", m.Key, m.Queue, want)
		}
	}
}

// A dead letter returns to its partition, or to that of its slot where the number is another one now.
func testPartitionsDeadLetters(t *testing.T, b *amqptest.Broker) {
	got := &recorder{fail: func(m *inbox.Message) error {
		if m.Replays == 0 {
			return inbox.Invalid(errBroken)
		}
		return nil
	}}
	c := consume(t, b, got, partitioned())
	keys := []string{"a", "b", "c", "d", "e", "f"}
	for _, key := range keys {
		b.Publish(t, "shop", "order.placed", keyed(key))
	}
	was := map[string]string{}
	for _, m := range got.await(t, len(keys)) {
		was[m.Key] = m.Queue
	}
	awaitDepth(t, b, "failed.validation", len(keys))
	dead, err := c.DeadLetters().List(t.Context(), inbox.Filter{})
	must(t, err)
	for _, d := range dead {
		if d.Message.Queue != was[d.Message.Key] {
			t.Errorf("a letter of %q is said to come from %q, not %q", d.Message.Key, d.Message.Queue, was[d.Message.Key])
		}
	}
	n, err := c.DeadLetters().Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "test"})
	if n.Returned != len(keys) || err != nil {
		t.Fatalf("%+v, %v", n, err)
	}
	for _, m := range got.await(t, 2*len(keys))[len(keys):] {
		if m.Queue != was[m.Key] || m.Replays != 1 {
			t.Errorf("%q came back in %q, not in %q: replay %d", m.Key, m.Queue, was[m.Key], m.Replays)
		}
	}
	lost := keyed("a")
	lost.Headers["holdfast-origin-queue"], lost.Headers["holdfast-failure-class"] = "orders.17", "validation"
	b.Publish(t, "", "failed.validation", lost)
	if n, err := c.DeadLetters().Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "test"}); n.Returned != 1 || err != nil {
		t.Fatalf("%+v, %v", n, err)
	}
	if m := got.await(t, 2*len(keys)+1)[2*len(keys)]; m.Queue != was["a"] {
		t.Errorf("the letter of a partition that is no more came back in %q, not in %q", m.Queue, was["a"])
	}
}

// A limit counts the messages of all partitions, and ends the whole Run.
func testPartitionsLimit(t *testing.T, b *amqptest.Broker) {
	cfg := partitioned()
	cfg.MessageLimit = 10
	got := &recorder{}
	c := newConsumer(t, b.Dial, got, cfg)
	must(t, c.Setup(t.Context()))
	publish(t, b, 8, 0, 4)
	start(t, c).await(t)
	if n := len(got.messages()); n != 10 {
		t.Errorf("%d messages", n)
	}
	testenv.Eventually(t, func() error { // the broker takes a while to count what was returned
		left := 0
		for i := range 4 {
			left += b.Depth(t, fmt.Sprint("orders.", i))
		}
		if left != 22 {
			return fmt.Errorf("%d messages are left", left)
		}
		return nil
	})
}

// Lost connections, while partitions change hands, cost neither messages nor the order of effects.
func testPartitionsNetwork(t *testing.T, b *amqptest.Broker) {
	const keys, each = 16, 60
	cfg := partitioned()
	cfg.Retry.MaxAttempts = 100
	afterSetup(t, b, cfg)
	s := newShop(0.05)
	s.overlaps = true
	var proxies []*testenv.Proxy
	for process := range 3 {
		proxies = append(proxies, testenv.NewProxy(t, b.URL))
		start(t, newConsumer(t, hasty(proxies[process].URL()), s.process(process), cfg))
	}
	for n := 0; n < each; n += 10 {
		publish(t, b, keys, n, 10)
		s.await(t, keys*n+keys)
		proxies[n/10%3].CutConnections()
	}
	s.await(t, keys*each)
	s.check(t, keys, each)
}
