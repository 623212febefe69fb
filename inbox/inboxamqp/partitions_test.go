package inboxamqp_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
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
	wantFinding(t, c, "is not that of 4 partitions")
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

// Queues of another number of partitions are found, and Setup leaves all as it is.
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
	must(t, deleteQueue(t, b, "orders.2")) // that is not all
	wantLeftover(t, newConsumer(t, b.Dial, &recorder{}, fewer), "orders.3")
}

func wantLeftover(t *testing.T, c *inboxamqp.Consumer, queue string) {
	t.Helper()
	if err := c.Setup(t.Context()); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("%q", queue)) {
		t.Errorf("Setup: %v", err)
	}
	wantFinding(t, c, fmt.Sprintf("queue %q", queue))
}

// shop is a handler with deduplication that notes who has done what.
type shop struct {
	mu      sync.Mutex
	done    map[uuid.UUID]bool
	running map[string]bool
	effects map[string][]string // bodies by key
	by      map[int]map[string]int
	wrong   []string
	fails   float64

	overlaps bool // a process that has lost its connection ends what it has begun, while another one begins
}

func newShop(fails float64) *shop {
	return &shop{done: map[uuid.UUID]bool{}, running: map[string]bool{}, effects: map[string][]string{}, by: map[int]map[string]int{}, fails: fails}
}

// process returns the handler of a process.
func (s *shop) process(number int) processorFunc {
	return func(_ context.Context, m *inbox.Message) error {
		s.begin(m)
		time.Sleep(rand.N(4 * time.Millisecond))
		return s.end(number, m)
	}
}

func (s *shop) begin(m *inbox.Message) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.running[m.Key] && !s.overlaps {
		s.wrong = append(s.wrong, "two messages at once of "+m.Key)
	}
	s.running[m.Key] = true
}

func (s *shop) end(number int, m *inbox.Message) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running[m.Key] = false
	if s.done[m.ID] {
		return nil
	}
	if rand.Float64() < s.fails {
		return errBroken
	}
	s.done[m.ID] = true
	s.effects[m.Key] = append(s.effects[m.Key], string(m.Body))
	if s.by[number] == nil {
		s.by[number] = map[string]int{}
	}
	s.by[number][m.Queue]++
	return nil
}

func (s *shop) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.done)
}

// queues are those of which a process has had messages since the last call.
func (s *shop) queues(number int) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n = len(s.by[number])
	delete(s.by, number)
	return n
}

// await waits for so many effects, or for that of all messages.
func (s *shop) await(t *testing.T, n int) {
	t.Helper()
	testenv.Eventually(t, patience, func() error {
		if got := s.count(); got < n {
			return fmt.Errorf("%d of %d messages", got, n)
		}
		return nil
	})
}

// check looks at the order of each key.
func (s *shop) check(t *testing.T, keys, each int) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, wrong := range s.wrong {
		t.Error(wrong)
	}
	if len(s.effects) != keys {
		t.Errorf("%d keys", len(s.effects))
	}
	for key, bodies := range s.effects {
		if len(bodies) != each {
			t.Errorf("%s: %d of %d messages", key, len(bodies), each)
		}
		for i, body := range bodies {
			if body != fmt.Sprint(i) {
				t.Errorf("%s is out of order: %v", key, bodies)
				break
			}
		}
	}
}

// publish puts messages of keys into the exchange, numbered from first on.
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
	s.check(t, keys, each)
	for process := 2; process <= 3; process++ {
		if s.queues(process) == 0 {
			t.Errorf("process %d had nothing to do", process)
		}
	}
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
	testenv.Eventually(t, patience, func() error {
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
	testenv.Eventually(t, patience, func() error { // the broker takes a while to count what was returned
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

// A partition that is missing is named, and all goes on when it is there again.
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
	case r := <-returned: // and not into the first partition
		if r.MessageId != lost.MessageId {
			t.Errorf("returned: %+v", r)
		}
	case <-time.After(patience):
		t.Error("a message of a partition that is missing has a route")
	}
	must(t, c.Setup(t.Context()))
	ready(t, c)
	publish(t, b, 16, 0, 1)
	got.distinct(t, 16)
}

func awaitMissing(t *testing.T, c *running, name string) {
	t.Helper()
	testenv.Eventually(t, patience, func() error {
		if err := c.Ready(t.Context()); !errors.Is(err, driver.ErrMissing) || !strings.Contains(err.Error(), name) {
			return fmt.Errorf("ready: %w", err)
		}
		return nil
	})
}

// A process with another number of partitions says so, and takes no messages.
func testPartitionsNumber(t *testing.T, b *amqptest.Broker) {
	afterSetup(t, b, partitioned())
	fewer := partitioned()
	fewer.Partitions = 2
	awaitMissing(t, start(t, newConsumer(t, b.Dial, &recorder{}, fewer)), "orders.slotless.2")
}

// Dead letters of the queue before it was split return to the partitions of their keys.
func testPartitionsSplit(t *testing.T, b *amqptest.Broker) {
	got := &recorder{}
	c := consume(t, b, got, partitioned())
	for k := range 8 {
		p := keyed(fmt.Sprint("k", k))
		p.Headers["holdfast-origin-queue"], p.Headers["holdfast-failure-class"] = "orders", "validation"
		if k%2 == 0 {
			delete(p.Headers, "CC") // of another sender
		}
		b.Publish(t, "", "failed.validation", p)
	}
	if n, err := c.DeadLetters().Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "test"}); n.Returned != 8 || err != nil {
		t.Fatalf("%+v, %v", n, err)
	}
	for _, m := range got.await(t, 8) {
		if want := fmt.Sprint("orders.", partition.Of(m.Key, "", partition.Slots)%4); m.Queue != want {
			t.Errorf("a letter of %s came back in %s, not in %s", m.Key, m.Queue, want)
		}
	}
}

// Logs of failures and of what is given up say which partition.
func testPartitionsLogged(t *testing.T, b *amqptest.Broker) {
	var log logBuffer
	cfg := partitioned()
	cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
	got := &recorder{fail: func(*inbox.Message) error { return inbox.Invalid(errBroken) }}
	consume(t, b, got, cfg)
	b.Publish(t, "shop", "order.placed", keyed("a"))
	m := got.await(t, 1)[0]
	testenv.Eventually(t, patience, func() error {
		if text := log.String(); !strings.Contains(text, "message not processed") || !strings.Contains(text, "partition="+m.Queue) {
			return fmt.Errorf("log: %s", text)
		}
		return nil
	})
}
