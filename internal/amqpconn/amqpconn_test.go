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
