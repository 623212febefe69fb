package inboxamqp_test

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
)

// These tests break their broker, so each uses a private one. They run one at a time.
func TestOwnBroker(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.RabbitMQ)
	for _, tt := range []struct {
		name, nightly string // nightly: why it does not run with every change
		test          func(*testing.T, *testenv.Server)
	}{
		{"memory alarm", "", testMemoryAlarm},
		{"long delay during an alarm", "", testLongDelayDuringAlarm},
		{"count of a busy queue", "", testBusyQueue},
		{"partitions after a restart", "RabbitMQ starts once more", testPartitionsRestart},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.nightly != "" {
				testenv.Nightly(t, tt.nightly)
			}
			tt.test(t, server)
		})
	}
}

// setMemory sets the broker's memory limit. A limit below its current use raises an alarm.
func setMemory(t *testing.T, server *testenv.Server, limit string) {
	t.Helper()
	must(t, server.Control(t.Context(), "set_vm_memory_high_watermark", "absolute", limit))
}

const alarm, noAlarm = "10MB", "1GB"

// Under a memory alarm the broker accepts no copies. Failed messages wait until it ends, even if they outnumber
// the workers and the prefetch. Other messages are still consumed, because that is how the alarm ends.
func testMemoryAlarm(t *testing.T, server *testenv.Server) {
	b := amqptest.On(t, server.URL(), server.AdminURL())
	var done atomic.Int64
	got := recorder{fail: func(m *inbox.Message) error {
		if m.Name == "bad" && m.Attempt == 1 {
			return errBroken
		}
		done.Add(1)
		return nil
	}}
	// The alarm must not outlast the wait for a confirm; otherwise the copy is published again.
	c := newConsumer(t, b.Dial, &got, config{Queue: "orders", Retry: quick, ConfirmTimeout: testenv.Patience})
	setUp(t, c)
	const bad, good = 60, 200
	publishAll(t, b, "orders", "bad", bad)
	publishAll(t, b, "orders", "order.placed", good)
	setMemory(t, server, alarm)
	r := start(t, c)
	passed := func(n int64) {
		t.Helper()
		testenv.Eventually(t, func() error {
			if d := done.Load(); d < n {
				return fmt.Errorf("%d of %d messages", d, n)
			}
			return nil
		})
	}
	passed(good)
	if err := r.Ready(t.Context()); err == nil {
		t.Error("ready under an alarm")
	}
	if n := len(got.messages()); n > bad+good {
		t.Errorf("%d deliveries of %d messages: handlers ran for nothing", n, bad+good)
	}
	setMemory(t, server, noAlarm)
	passed(good + bad)
	ready(t, r)
	r.stop(t)
	awaitDepth(t, b, "orders", 0)
	awaitDepth(t, b, "orders.failed.default", 0)
}

// A key keeps its partition. A consistent-hash exchange makes a new ring when its broker restarts, and later
// messages of a key then overtake queued ones.
func testPartitionsRestart(t *testing.T, server *testenv.Server) {
	const keys = 64
	b := amqptest.On(t, server.URL(), server.AdminURL())
	cfg := partitioned()
	cfg.Partitions = 12 // with two digits the broker's order of names differs from the order of the numbers
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

// A quorum queue that is too busy to count, and slow to reach, must not count as empty.
func testBusyQueue(t *testing.T, server *testenv.Server) {
	const count = 2
	b := amqptest.On(t, server.URL(), server.AdminURL())
	for _, name := range []string{"q", "other"} {
		b.Queue(t, name, amqp.Table{"x-queue-type": "quorum"})
	}
	publishAll(t, b, "q", "order.placed", count)
	awaitDepth(t, b, "q", count)
	far := testenv.NewProxy(t, b.URL)
	far.Delay(150 * time.Millisecond)
	conn, err := amqpconn.Open(t.Context(), hasty(far.URL()), testenv.Patience)
	must(t, err)
	defer conn.Close()
	must(t, server.Control(t.Context(), "eval", fmt.Sprintf(`
		{ok, Queue} = rabbit_amqqueue:lookup(rabbit_misc:r(<<%q>>, queue, <<"q">>)),
		{Name, _} = amqqueue:get_pid(Queue),
		Leader = whereis(Name),
		spawn(fun() -> sys:suspend(Leader), timer:sleep(3500), sys:resume(Leader) end),
		ok.`, b.VHost)))
	if q, err := conn.Count("q"); q.Messages == 0 && err == nil {
		t.Error("a queue that does not reply was counted as empty")
	}
	if q, err := conn.Count("other"); q.Messages != 0 || err != nil {
		t.Errorf("a queue that replies: %d messages, error %v", q.Messages, err)
	}
	testenv.Eventually(t, func() error {
		q, err := conn.Count("q")
		if err == nil && q.Messages != count {
			err = fmt.Errorf("%d of %d messages", q.Messages, count)
		}
		return err
	})
}

// Messages that wait for the rest of a long delay, and cannot be published because of an alarm, must not block the
// others.
func testLongDelayDuringAlarm(t *testing.T, server *testenv.Server) {
	b := amqptest.On(t, server.URL(), server.AdminURL())
	src := newSource(t, b.Dial, config{ConfirmTimeout: 500 * time.Millisecond})
	const window = 4
	for range 2 * window {
		p := order()
		p.Headers = amqp.Table{"holdfast-wait": "100"}
		b.Publish(t, "", "orders", p)
	}
	numbered(t, b, "orders", 1, window)
	setMemory(t, server, alarm)
	defer setMemory(t, server, noAlarm)
	s := open(t, src, window)
	if got := bodies(take(t, s, window)); got != "1 2 3 4" {
		t.Errorf("received %s", got)
	}
}
