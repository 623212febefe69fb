package amqpconn_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv"
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

// ledger counts the calls of every done function.
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

func TestPublishInOrder(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Queue(t, "q", nil)
	p := start(t, amqpconn.PublisherConfig{Dial: b.Dial, Window: 16})
	const n = 500
	var l ledger
	for i := range n {
		id := fmt.Sprint(i)
		p.Publish(t.Context(), out("", "q", id), l.done(id))
	}
	if got := len(l.confirmed(t)); got != n {
		t.Fatalf("%d of %d confirmed", got, n)
	}
	for i, d := range b.Take(t, "q", n, testenv.Patience) {
		if d.MessageId != fmt.Sprint(i) {
			t.Fatalf("message %d has the id %s", i, d.MessageId)
		}
	}
	if err := p.Ready(); err != nil {
		t.Error(err)
	}
}

// The channels share one window, and each stripe keeps its order.
func TestStripes(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Queue(t, "q", nil)
	p := start(t, amqpconn.PublisherConfig{Dial: b.Dial, Window: 16, Channels: 4})
	const n, stripes = 500, 7
	var l ledger
	for i := range n {
		o := out("", "q", fmt.Sprint(i))
		o.Stripe = uint32(i % stripes)
		p.Publish(t.Context(), o, l.done(o.Message.MessageId))
	}
	if got := len(l.confirmed(t)); got != n {
		t.Fatalf("%d of %d confirmed", got, n)
	}
	next := [stripes]int{0, 1, 2, 3, 4, 5, 6}
	for _, d := range b.Take(t, "q", n, testenv.Patience) {
		i, err := strconv.Atoi(d.MessageId)
		if err != nil || i != next[i%stripes] {
			t.Fatalf("message %s, want %d of its stripe (%v)", d.MessageId, next[i%stripes], err)
		}
		next[i%stripes] += stripes
	}
}

// Every second message is returned; each return must be paired with its own confirm.
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

func TestMissingExchange(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Exchange(t, "there", "fanout")
	b.Queue(t, "q", nil)
	b.Bind(t, "q", "", "there")
	p := start(t, amqpconn.PublisherConfig{Dial: b.Dial, Channels: 4})
	if err := p.Confirmed(t.Context(), out("missing", "k", "1")); !errors.Is(err, amqpconn.ErrUnroutable) {
		t.Errorf("missing exchange: %v", err)
	}
	if err := p.Confirmed(t.Context(), out("there", "k", "2")); err != nil {
		t.Errorf("the other exchange: %v", err)
	}
	// An exchange that vanishes later takes the channel with it, and only its own messages are to blame.
	if err := b.Channel(t).ExchangeDelete("there", false, false); err != nil {
		t.Fatal(err)
	}
	if err := p.Confirmed(t.Context(), out("there", "k", "3")); !errors.Is(err, amqpconn.ErrUnroutable) {
		t.Errorf("deleted exchange: %v", err)
	}
	testenv.Eventually(t, func() error { return p.Confirmed(t.Context(), out("", "q", "4")) })
	b.Take(t, "q", 2, testenv.Patience)
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
