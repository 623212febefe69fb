package outboxamqp_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/format"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
	"github.com/holdfast-go/holdfast/outbox/outboxtest/conformance"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func publish(t testing.TB, p driver.Publisher, m driver.Message) error {
	t.Helper()
	outcome := make(chan error, 2)
	p.Publish(t.Context(), m, func(err error) { outcome <- err })
	select {
	case err := <-outcome:
		return err
	case <-time.After(testenv.Patience):
		t.Fatal("done was not called")
		return nil
	}
}

func message(t testing.TB, name string) driver.Message {
	t.Helper()
	return conformance.NewMessage(t, name, map[string]int{"n": 1})
}

func TestWireFormat(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Exchange(t, "events", "topic")
	b.Queue(t, "q", nil)
	b.Bind(t, "q", "order.#", "events")
	m := message(t, "order.placed")
	m.Headers = map[string]string{"tenant": "a", "region": "eu", `X-Message-Stamp-App\Bus`: "[]"}
	m.RouteHeaders = map[string]string{"region": "us"}
	m.CreatedAt = time.Unix(1_700_000_000, 0)
	plain := running(t, b.Dial, outboxamqp.Config{Exchange: "events"})
	php := format.Symfony{Classes: map[string]string{"order.placed": `App\OrderPlaced`}, IDStamp: `App\MessageIdStamp`}
	compat := running(t, b.Dial, outboxamqp.Config{Exchange: "elsewhere", Format: php, Router: func(m outbox.Message) outbox.Route {
		return outbox.Route{Exchange: "events", Headers: m.Route.Headers}
	}})
	for _, p := range []*outboxamqp.Publisher{plain, compat} {
		must(t, publish(t, p, m))
	}
	for i, d := range b.Take(t, "q", 2, testenv.Patience) {
		if d.MessageId != m.ID.String() || d.Type != "order.placed" ||
			d.DeliveryMode != amqp.Persistent || !d.Timestamp.Equal(m.CreatedAt) || string(d.Body) != `{"n":1}` ||
			d.Exchange != "events" || d.RoutingKey != "order.placed" {
			t.Errorf("message %d: %+v", i, d)
		}
		if d.Headers["tenant"] != "a" || d.Headers["region"] != "us" || d.Headers[`X-Message-Stamp-App\Bus`] != "[]" || d.Headers["CC"] != nil {
			t.Errorf("headers %v", d.Headers)
		}
		var wantType, wantStamp any
		var wantContent string
		if i == 1 {
			wantContent = "application/json"
			wantType, wantStamp = `App\OrderPlaced`, `[{"messageId":"`+m.ID.String()+`"}]`
		}
		if d.ContentType != wantContent || d.Headers["type"] != wantType || d.Headers[`X-Message-Stamp-App\MessageIdStamp`] != wantStamp || d.Headers["X-Message-Stamp-MessageIdStamp"] != nil {
			t.Errorf("message %d: content type %q, headers %v", i, d.ContentType, d.Headers)
		}
	}
}

// A message with a key has its slot as a second routing key, for any route.
func TestSlot(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Exchange(t, "events", "topic")
	b.Queue(t, "q", nil)
	b.Bind(t, "q", "holdfast.slot.8", "events")
	p := running(t, b.Dial, outboxamqp.Config{Exchange: "events"})
	for key, routed := range map[string]bool{"customer-7": true, "customer-8": false, "": false} {
		m := message(t, "order.placed")
		m.Key = key
		m.Headers = map[string]string{"CC": "of the sender"}
		if key == "" {
			m.Headers = nil
		}
		if err := publish(t, p, m); (err == nil) != routed {
			t.Errorf("key %q: %v", key, err)
		}
	}
	if d := b.Take(t, "q", 1, testenv.Patience)[0]; d.RoutingKey != "order.placed" || d.Headers["holdfast-key"] != "customer-7" {
		t.Errorf("%+v", d)
	}
}

func TestClasses(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Exchange(t, "events", "topic")
	full := amqp.Table{"x-max-length": int32(1), "x-overflow": "reject-publish"}
	b.Queue(t, "full", full)
	p := running(t, b.Dial, outboxamqp.Config{Exchange: "events", Routes: map[string]outbox.Route{
		"to.missing": {Exchange: "missing"}, "too.long": {RoutingKey: strings.Repeat("k", 256)},
	}})
	direct := running(t, b.Dial, outboxamqp.Config{})
	must(t, publish(t, direct, message(t, "full")))
	large, nameless := message(t, "order.placed"), message(t, "order.placed")
	large.Body = make([]byte, 16<<20+1)
	nameless.ID = uuid.New()
	for name, tt := range map[string]struct {
		p    *outboxamqp.Publisher
		m    driver.Message
		want driver.Class
	}{
		"no queue is bound":    {p, message(t, "order.placed"), driver.Unroutable},
		"exchange missing":     {p, message(t, "to.missing"), driver.Unroutable},
		"body too large":       {p, large, driver.Permanent},
		"id of version 4":      {p, nameless, driver.Permanent},
		"queue full":           {direct, message(t, "full"), driver.Retryable},
		"routing key too long": {p, message(t, "too.long"), driver.Permanent},
	} {
		if got := driver.ClassOf(publish(t, tt.p, tt.m)); got != tt.want {
			t.Errorf("%s: class %s, want %s", name, got, tt.want)
		}
	}
}

func TestConfig(t *testing.T) {
	t.Parallel()
	_, err := outboxamqp.NewPublisher(nil, outboxamqp.Config{Timeout: -1, Format: format.Symfony{IDStamp: "no class"}})
	for _, want := range []string{"dial", "Timeout", "Format"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v does not name %s", err, want)
		}
	}
}

// The relay may be ready before the first connection, and the broker may start later.
func TestStartsBeforeItsBroker(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Queue(t, "q", nil)
	proxy := testenv.NewProxy(t, b.URL)
	proxy.Cut()
	p := newPublisher(t, through(proxy), outboxamqp.Config{})
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = p.Run(ctx) })
	defer running.Wait()
	defer cancel()
	if err := publish(t, p, message(t, "q")); driver.ClassOf(err) != driver.Unavailable {
		t.Errorf("without a broker: %v", err)
	}
	proxy.Heal()
	testenv.Eventually(t, func() error { return p.Ready(t.Context()) })
	if err := publish(t, p, message(t, "q")); err != nil {
		t.Error(err)
	}
	cancel()
	running.Wait()
	if err := publish(t, p, message(t, "q")); driver.ClassOf(err) != driver.Unavailable {
		t.Errorf("after Run: %v", err)
	}
	if err := p.Ready(t.Context()); err == nil {
		t.Error("ready after Run")
	}
}

// Messages in the window are still confirmed after Run is cancelled.
func TestDrain(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Queue(t, "q", nil)
	p := newPublisher(t, b.Dial, outboxamqp.Config{})
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = p.Run(ctx) })
	const n = 200
	outcomes := make(chan error, n)
	for range n {
		p.Publish(t.Context(), message(t, "q"), func(err error) { outcomes <- err })
	}
	cancel()
	running.Wait()
	if len(outcomes) != n {
		t.Fatalf("%d of %d done when Run returned", len(outcomes), n)
	}
	close(outcomes)
	for err := range outcomes {
		must(t, err)
	}
	if depth := b.Depth(t, "q"); depth != n {
		t.Errorf("%d messages in the queue", depth)
	}
}

// The connection stays open while any Run is active.
func TestRunTwiceAtOnce(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Queue(t, "q", nil)
	p := newPublisher(t, b.Dial, outboxamqp.Config{})
	for round := range 2 {
		var cancels [2]context.CancelFunc
		ended := make(chan error, 2)
		for i := range cancels {
			var ctx context.Context
			ctx, cancels[i] = context.WithCancel(t.Context())
			defer cancels[i]()
			go func() { ended <- p.Run(ctx) }()
		}
		testenv.Eventually(t, func() error { return p.Ready(t.Context()) })
		for i, cancel := range cancels {
			if err := publish(t, p, message(t, "q")); err != nil {
				t.Errorf("round %d, %d Runs ended: %v", round, i, err)
			}
			cancel()
			if err := <-ended; err != nil {
				t.Errorf("round %d: %v", round, err)
			}
		}
		if p.Ready(t.Context()) == nil {
			t.Errorf("round %d: ready after the last Run", round)
		}
	}
}

// The broker does not confirm while a proxy holds the messages.
func TestWindow(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Queue(t, "q", nil)
	proxy := testenv.NewProxy(t, b.URL)
	p, err := outboxamqp.NewPublisherWithWindow(through(proxy), outboxamqp.Config{Logger: slog.New(slog.DiscardHandler)}, 7)
	must(t, err)
	run(t, p)
	wants := func(want int) {
		t.Helper()
		if used, size := p.Window(); used != want || size != 7 {
			t.Errorf("%d of %d, want %d of 7", used, size, want)
		}
	}
	testenv.Eventually(t, func() error { return p.Ready(t.Context()) })
	wants(0)
	proxy.Pause()
	outcomes := make(chan error, 3)
	for range cap(outcomes) {
		p.Publish(t.Context(), message(t, "q"), func(err error) { outcomes <- err })
	}
	wants(3)
	proxy.Heal()
	for range cap(outcomes) {
		if err := <-outcomes; err != nil {
			t.Error(err)
		}
	}
	wants(0)
}

func TestErrorsUnwrap(t *testing.T) {
	t.Parallel()
	refused := errors.New("refused")
	p := newPublisher(t, func(context.Context) (*amqp.Connection, error) { return nil, refused }, outboxamqp.Config{})
	if err := p.Check(t.Context()); !errors.Is(err, refused) {
		t.Errorf("Check: %v", err)
	}
	if err := p.Setup(t.Context()); err == nil {
		t.Error("Setup of the default exchange")
	}
}

// Listeners are notified of every new connection until they stop listening.
func TestOnReady(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Queue(t, "q", nil)
	p := running(t, b.Dial, outboxamqp.Config{})
	ready := make(chan struct{}, 100)
	stop := p.OnReady(func() { ready <- struct{}{} })
	testenv.Eventually(t, func() error { return p.Ready(t.Context()) })
	for len(ready) > 0 {
		<-ready // the first connection, if it opened after the call
	}
	for range 2 {
		b.CloseConnections(t)
		select {
		case <-ready:
		case <-time.After(testenv.Patience):
			t.Fatal("not told of a new connection")
		}
		if err := p.Ready(t.Context()); err != nil {
			t.Error(err)
		}
	}
	stop()
	b.CloseConnections(t)
	testenv.Eventually(t, func() error { return publish(t, p, message(t, "q")) })
	if len(ready) > 0 {
		t.Error("told although nobody listens")
	}
}

func TestDial(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Queue(t, "q", nil)
	var dialled net.Conn
	for name, cfg := range map[string]amqp.Config{
		"zero": {},
		"own dial function": {Dial: func(network, addr string) (net.Conn, error) {
			conn, err := amqp.DefaultDial(10*time.Second)(network, addr)
			dialled = conn
			return conn, err
		}},
	} {
		p := running(t, outboxamqp.Dial(b.URL, cfg), outboxamqp.Config{})
		if err := publish(t, p, message(t, "q")); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if dialled == nil {
		t.Error("the own dial function was not called")
	}
	b.Take(t, "q", 2, testenv.Patience)
}

// A silent host must not block the caller beyond its deadline.
func TestDialHonoursDeadline(t *testing.T) {
	t.Parallel()
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer silent.Close()
	dial := outboxamqp.Dial("amqp://"+silent.Addr().String(), amqp.Config{})
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond) // timing: it must pass
	defer cancel()
	if _, err := dial(ctx); err == nil {
		t.Error("connected to a host that says nothing")
	}
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := dial(cancelled); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

// A broker that falls silent with messages in flight does not delay the end of a relay.
func TestRelayEndsInTimeWithoutAnswers(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "measures the end of Run")
	b := amqptest.New(t)
	b.Queue(t, "q", nil)
	proxy := testenv.NewProxy(t, b.URL)
	quiet := slog.New(slog.DiscardHandler)
	const limit, forever = 3 * time.Second, 2 * testenv.Patience
	p := newPublisher(t, through(proxy), outboxamqp.Config{Timeout: forever, Logger: quiet})
	store := outboxtest.New()
	relay, err := outbox.NewRelay(store, p, outbox.RelayConfig{ShutdownTimeout: limit, PublishTimeout: forever, Logger: quiet})
	must(t, err)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- relay.Run(ctx) }()
	testenv.Eventually(t, func() error { return relay.Ready(t.Context()) })
	// The publisher replaces a connection that was silent for 7 s, plus a second for each MiB in transit. The
	// silence starts with the messages, so it lasts longer than the limit.
	proxy.SilenceOn(testenv.Silence{On: "11111111"})
	msgs := slices.Repeat([]outbox.Message{{Name: "q", Body: bytes.Repeat([]byte("1"), 1<<20)}}, 60)
	if err := txretrytest.New(txretrytest.Config{}).Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		return store.Write(ctx, tx, msgs...)
	}); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, func() error {
		if used, _ := p.Window(); used == 0 {
			return errors.New("nothing is on its way")
		}
		return nil
	})
	proxy.Pause() // another connection as well
	start := time.Now()
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if took := time.Since(start); took > limit+3*time.Second {
		t.Errorf("Run took %v to end, %v are allowed", took, limit)
	}
}
