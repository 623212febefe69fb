package amqpconn_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/silent"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

var quiet = slog.New(slog.DiscardHandler)

// start runs a publisher until the test ends.
func start(t *testing.T, cfg amqpconn.PublisherConfig) *amqpconn.Publisher {
	t.Helper()
	cfg.Logger = quiet
	p := amqpconn.NewPublisher(cfg)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { p.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	return p
}

func out(exchange, key, id string) amqpconn.Out {
	return amqpconn.Out{Exchange: exchange, Key: key, Message: amqp.Publishing{MessageId: id, DeliveryMode: amqp.Persistent, Body: []byte(id)}}
}

// ledger counts the calls of each done function.
type ledger struct {
	mu       sync.Mutex
	outcomes map[string][]error
	pending  sync.WaitGroup
}

func (l *ledger) done(id string) func(error) {
	l.pending.Add(1)
	return func(err error) {
		l.mu.Lock()
		if l.outcomes == nil {
			l.outcomes = map[string][]error{}
		}
		l.outcomes[id] = append(l.outcomes[id], err)
		first := len(l.outcomes[id]) == 1
		l.mu.Unlock()
		if first {
			l.pending.Done()
		}
	}
}

func (l *ledger) confirmed(t *testing.T) []string {
	t.Helper()
	l.pending.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	var ids []string
	for id, errs := range l.outcomes {
		if len(errs) != 1 {
			t.Errorf("done of %s was called %d times", id, len(errs))
		}
		if errs[0] == nil {
			ids = append(ids, id)
		}
	}
	return ids
}

// The channels share one window, and each stripe keeps its order.
func TestStripes(t *testing.T) {
	t.Parallel()
	testenv.AMQPURL(t) // skips before there are subtests
	for _, tt := range []struct{ channels, stripes int }{{1, 1}, {4, 7}} {
		t.Run(fmt.Sprintf("%d channels", tt.channels), func(t *testing.T) {
			t.Parallel()
			b := amqptest.New(t)
			b.Queue(t, "q", nil)
			p := start(t, amqpconn.PublisherConfig{Dial: b.Dial, Window: 16, Channels: tt.channels})
			const n = 300
			var l ledger
			for i := range n {
				o := out("", "q", fmt.Sprint(i))
				o.Stripe = uint32(i % tt.stripes)
				p.Publish(t.Context(), o, l.done(o.Message.MessageId))
			}
			if got := len(l.confirmed(t)); got != n {
				t.Fatalf("%d of %d confirmed", got, n)
			}
			if err := p.Ready(); err != nil {
				t.Error(err)
			}
			next := make([]int, tt.stripes)
			for stripe := range next {
				next[stripe] = stripe
			}
			for _, d := range b.Take(t, "q", n, testenv.Patience) {
				i, err := strconv.Atoi(d.MessageId)
				if err != nil || i != next[i%tt.stripes] {
					t.Fatalf("message %s, want %d of its stripe (%v)", d.MessageId, next[i%tt.stripes], err)
				}
				next[i%tt.stripes] += tt.stripes
			}
		})
	}
}

// Every second message is returned. Each return must be matched with its own confirm.
func TestReturned(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Queue(t, "q", amqp.Table{"x-queue-type": "quorum"})
	p := start(t, amqpconn.PublisherConfig{Dial: b.Dial, Window: 64})
	const n = 400
	var l ledger
	for i := range n {
		id := fmt.Sprint(i)
		p.Publish(t.Context(), out("", []string{"q", "nowhere"}[i%2], id), l.done(id))
	}
	if got := len(l.confirmed(t)); got != n/2 {
		t.Errorf("%d of %d confirmed", got, n/2)
	}
	for i := range n {
		err := l.outcomes[fmt.Sprint(i)][0]
		if routed := i%2 == 0; routed != (err == nil) || !routed && !errors.Is(err, amqpconn.ErrUnroutable) {
			t.Errorf("message %d: %v", i, err)
		}
	}
}

func TestInvalid(t *testing.T) {
	t.Parallel()
	p := amqpconn.NewPublisher(amqpconn.PublisherConfig{Logger: quiet})
	long := strings.Repeat("k", 256)
	for name, o := range map[string]amqpconn.Out{
		"routing key": out("", long, "1"),
		"exchange":    out(long, "", "1"),
		"header name": {Message: amqp.Publishing{Headers: amqp.Table{long: "v"}}},
		"header size": {Message: amqp.Publishing{Headers: amqp.Table{"h": strings.Repeat("v", 70<<10)}}},
		"nested size": {Message: amqp.Publishing{Headers: amqp.Table{"h": amqp.Table{"t": []any{strings.Repeat("v", 70<<10)}}}}},
		"header type": {Message: amqp.Publishing{Headers: amqp.Table{"h": struct{}{}}}},
		"CC":          {Message: amqp.Publishing{Headers: amqp.Table{"CC": "other"}}},
	} {
		if err := p.Confirmed(t.Context(), o); !errors.Is(err, amqpconn.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestNotConnected(t *testing.T) {
	t.Parallel()
	refused := errors.New("refused")
	p := start(t, amqpconn.PublisherConfig{Dial: func(context.Context) (*amqp.Connection, error) { return nil, refused }})
	err := p.Confirmed(t.Context(), out("", "q", "1"))
	if !errors.Is(err, amqpconn.ErrUnavailable) || !errors.Is(err, refused) {
		t.Errorf("publish: %v", err)
	}
	if err := p.Ready(); !errors.Is(err, amqpconn.ErrUnavailable) {
		t.Errorf("ready: %v", err)
	}
}

// The connection is lost repeatedly while messages are published.
func TestConnectionLost(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Queue(t, "q", nil)
	proxy, dial := through(t, b)
	p := start(t, amqpconn.PublisherConfig{Dial: dial, Window: 32, Channels: 3})
	var l ledger
	stop := make(chan struct{})
	var publishing sync.WaitGroup
	publishing.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond): // timing: a message each millisecond
				o := out("", "q", fmt.Sprint(i))
				o.Stripe = uint32(i)
				p.Publish(t.Context(), o, l.done(o.Message.MessageId))
			}
		}
	})
	for i := range 3 {
		testenv.Eventually(t, func() error { return p.Confirmed(t.Context(), out("", "q", fmt.Sprint("before ", i))) })
		proxy.CutConnections()
	}
	testenv.Eventually(t, func() error { return p.Confirmed(t.Context(), out("", "q", "after")) })
	close(stop)
	publishing.Wait()
	confirmed := l.confirmed(t)
	if len(confirmed) == 0 || len(confirmed) == len(l.outcomes) {
		t.Fatalf("%d of %d confirmed: the fault did not hit", len(confirmed), len(l.outcomes))
	}
	arrived := map[string]bool{}
	for _, d := range b.Take(t, "q", b.Depth(t, "q"), testenv.Patience) {
		arrived[d.MessageId] = true
	}
	for _, id := range confirmed {
		if !arrived[id] {
			t.Errorf("message %s was confirmed and is not there", id)
		}
	}
}

// through dials a broker through a network that the test can cut.
func through(t *testing.T, b *amqptest.Broker) (*testenv.Proxy, func(context.Context) (*amqp.Connection, error)) {
	t.Helper()
	proxy := testenv.NewProxy(t, b.URL)
	return proxy, func(context.Context) (*amqp.Connection, error) { return amqp.Dial(proxy.URL()) }
}

// silenced returns a publisher whose broker has confirmed one message to the queue "q" and then stays silent until
// the proxy resumes.
func silenced(t *testing.T, cfg amqpconn.PublisherConfig) (*amqpconn.Publisher, *testenv.Proxy) {
	t.Helper()
	b := amqptest.New(t)
	b.Queue(t, "q", nil)
	proxy, dial := through(t, b)
	cfg.Dial = dial
	p := start(t, cfg)
	testenv.Eventually(t, func() error { return p.Confirmed(t.Context(), out("", "q", "first")) })
	proxy.Pause()
	return p, proxy
}

// A call whose context ends returns soon, and its places in the window are counted until the confirm.
func TestCallerLeaves(t *testing.T) {
	t.Parallel()
	p, proxy := silenced(t, amqpconn.PublisherConfig{Window: 4})
	ctx, cancel := context.WithCancel(t.Context())
	var l ledger
	for _, id := range []string{"1", "2", "3", "4"} {
		p.Publish(ctx, out("", "q", id), l.done(id))
	}
	cancel()
	for _, id := range []string{"5", "6"} {
		p.Publish(ctx, out("", "q", id), l.done(id))
	}
	if got := l.confirmed(t); len(got) != 0 {
		t.Errorf("confirmed: %v", got)
	}
	proxy.Resume()
	for i := range 20 {
		if err := p.Confirmed(t.Context(), out("", "q", fmt.Sprint("after ", i))); err != nil {
			t.Fatal(err)
		}
	}
}

// A call that was cancelled frees its place in the end, even if the broker never confirms.
func TestCallerLeavesSilentBroker(t *testing.T) {
	t.Parallel()
	down := make(chan struct{}, 100)
	p, _ := silenced(t, amqpconn.PublisherConfig{
		Timeout: time.Second, ConfirmTimeout: time.Second, Window: 4, Down: func(error) { down <- struct{}{} },
	})
	for len(down) > 0 {
		<-down
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond) // timing: it must pass
	defer cancel()
	if err := p.Confirmed(ctx, out("", "q", "1")); !errors.Is(err, amqpconn.ErrUnavailable) {
		t.Fatal(err)
	}
	select {
	case <-down:
	case <-time.After(testenv.Patience):
		t.Error("the connection is kept")
	}
}

// The Done channel of context.Background is nil. A publisher that runs on it works normally, also after a lost
// connection.
func TestRunOnBackground(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Queue(t, "q", nil)
	ended, last := make(chan struct{}), make(chan struct{})
	proxy, dial := through(t, b)
	p := amqpconn.NewPublisher(amqpconn.PublisherConfig{Dial: dial, Logger: quiet, Down: func(error) {
		select {
		case <-last:
			runtime.Goexit() // nothing else ends Run
		default:
		}
	}})
	var running sync.WaitGroup
	running.Go(func() {
		defer close(ended)
		p.Run(context.Background())
	})
	for _, id := range []string{"first", "after a fault"} {
		testenv.Eventually(t, func() error { return p.Confirmed(context.Background(), out("", "q", id)) })
		select {
		case <-ended:
			t.Fatal("Run has ended")
		default:
		}
		if id == "first" {
			proxy.CutConnections()
		}
	}
	close(last)
	proxy.CutConnections()
	running.Wait()
}

// A broker under a memory alarm does not read from publishing connections. Publishing then fails at once.
func TestBlocked(t *testing.T) {
	t.Parallel()
	onBroker(t, func(t *testing.T, b *silent.AMQP) {
		b.Block()
		testBlocked(t, b.Dial, b.Unblock)
	})
}

func TestBlocked_onRabbitMQ(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "it starts a broker under a memory alarm")
	server := testenv.Private(t, testenv.RabbitMQ, "vm_memory_high_watermark.absolute = 10MB")
	testBlocked(t, func(context.Context) (*amqp.Connection, error) { return amqp.Dial(server.URL()) }, func() {
		if err := server.Control(t.Context(), "set_vm_memory_high_watermark", "absolute", "1GB"); err != nil {
			t.Fatal(err)
		}
	})
}

func testBlocked(t *testing.T, dial amqpconn.Dial, unblock func()) {
	t.Helper()
	var ready atomic.Int64
	p := start(t, amqpconn.PublisherConfig{
		Up: func() { ready.Add(1) }, Dial: dial, ConfirmTimeout: 10 * time.Second, Window: 4, ShutdownTimeout: time.Second,
	})
	// One message more than the window holds: it waits for a place when the block is detected.
	outcomes := make(chan error, 5)
	go func() {
		for range cap(outcomes) {
			p.Publish(t.Context(), out("", "q", "0"), func(err error) { outcomes <- err })
		}
	}()
	for range cap(outcomes) {
		if err := <-outcomes; !errors.Is(err, amqpconn.ErrBlocked) {
			t.Errorf("at first: %v", err)
		}
	}
	testenv.Eventually(t, func() error {
		if err := p.Confirmed(t.Context(), out("", "q", "1")); !errors.Is(err, amqpconn.ErrBlocked) {
			return err
		}
		return nil
	})
	start := time.Now()
	if err := p.Confirmed(t.Context(), out("", "q", "2")); !errors.Is(err, amqpconn.ErrBlocked) || time.Since(start) > 5*time.Second {
		t.Errorf("after %v: %v", time.Since(start), err)
	}
	if err := p.Ready(); !errors.Is(err, amqpconn.ErrBlocked) {
		t.Errorf("ready: %v", err)
	}

	before := ready.Load()
	unblock()
	testenv.Eventually(t, func() error {
		if ready.Load() == before {
			return errors.New("Up was not called at the end of the alarm")
		}
		return p.Ready()
	})
}

// RabbitMQ closes the channel over a message above its limit, and the connection over headers that do not fit in a
// frame. Only that message fails.
func TestLargerThanTheBrokerTakes(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "it starts a broker with a limit of its own")
	losingNone(t, largerThanTheBrokerTakes)
}

func largerThanTheBrokerTakes(t *testing.T) (int64, error) {
	t.Helper()
	var failures []error
	server := testenv.Private(t, testenv.RabbitMQ, "max_message_size = 65536", "frame_max = 8192")
	var lost atomic.Int64
	p := start(t, amqpconn.PublisherConfig{
		Dial: func(context.Context) (*amqp.Connection, error) { return amqp.Dial(server.URL()) },
		Down: func(error) { lost.Add(1) },
	})
	if err := onPrivate(t, server, func(ch *amqp.Channel) error {
		_, err := ch.QueueDeclare("q", true, false, false, false, nil)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	huge, wide := out("", "q", "huge"), out("", "q", "wide")
	huge.Message.Body = make([]byte, 70_000)
	wide.Message.Headers = amqp.Table{"h": strings.Repeat("v", 8192)}
	fits := out("", "q", "fits")
	fits.Message.Headers = amqp.Table{"h": strings.Repeat("v", 8000)}
	var l ledger
	for i := range 20 {
		for _, o := range []amqpconn.Out{huge, out("", "q", "innocent"), wide, fits} {
			o.Message.MessageId += fmt.Sprint(" ", i)
			p.Publish(t.Context(), o, l.done(o.Message.MessageId))
		}
	}
	l.confirmed(t)
	for id, errs := range l.outcomes {
		var want error
		if strings.HasPrefix(id, "huge") || strings.HasPrefix(id, "wide") {
			want = amqpconn.ErrInvalid
		}
		if !errors.Is(errs[0], want) {
			failures = append(failures, fmt.Errorf("%s: %v, want %v", id, errs[0], want))
		}
	}
	return lost.Load(), errors.Join(failures...)
}

func onPrivate(t *testing.T, server *testenv.Server, do func(*amqp.Channel) error) error {
	t.Helper()
	conn, err := amqp.Dial(server.URL())
	if err != nil {
		return err
	}
	defer conn.Close()
	ch, err := conn.Channel()
	if err != nil {
		return err
	}
	return do(ch)
}
