package inboxamqp_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/internal/amqptest"
)

// mendable is what Check promises of each of its findings.
type mendable interface {
	error
	Mend() string
}

// findings are those of Check.
func findings(t *testing.T, c *inboxamqp.Consumer) (all []mendable) {
	t.Helper()
	err := c.Check(t.Context())
	if err == nil {
		return nil
	}
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		t.Fatalf("Check returned %T: %v", err, err)
	}
	for _, one := range joined.Unwrap() {
		found, ok := one.(mendable)
		if !ok || found.Mend() == "" {
			t.Fatalf("nothing to mend: %v", one)
		}
		all = append(all, found)
	}
	return all
}

// afterSetup is a consumer whose topology is there.
func afterSetup(t *testing.T, b *amqptest.Broker, cfg config) *inboxamqp.Consumer {
	t.Helper()
	c := newConsumer(t, b.Dial, &recorder{}, cfg)
	setUp(t, c)
	return c
}

func TestCheckTimes(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	const day = 24 * time.Hour
	for name, tt := range map[string]struct {
		cfg  config
		want string // in the only finding; empty for none
	}{
		"default":               {cfg: config{}},
		"default retention":     {cfg: config{Retention: driver.DefaultRetention}},
		"default batches":       {cfg: config{Batch: 100}},
		"retention too short":   {config{Retention: day}, "takes effect again"},
		"retries for too long":  {config{Retention: 8 * day, Retry: inbox.RetryPolicy{MaxAge: 5 * day}}, "takes effect again"},
		"nothing is remembered": {cfg: config{Retry: inbox.RetryPolicy{MaxAge: 5 * day}}},
		"prefetch too large":    {config{HandlerTimeout: 15 * time.Minute}, "16 prefetched messages, 8 at once in up to 15m0s, may take longer than the 30m0s"},
		"batches count, too":    {config{Concurrency: 1, Batch: 100, Prefetch: 500}, "500 prefetched messages, 100 at once in up to 10m0s"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := findings(t, afterSetup(t, b, tt.cfg))
			switch {
			case tt.want == "" && len(got) != 0:
				t.Errorf("findings %v", got)
			case tt.want != "" && (len(got) != 1 || !strings.Contains(got[0].Error(), tt.want)):
				t.Errorf("findings %v, want one with %q", got, tt.want)
			}
		})
	}
}

// checked is a processor with something to mend.
type checked struct{ recorder }

func (*checked) Check(context.Context) error { return errors.Join(errBroken, errBroken) }

// Check asks the processor, too, and tells of a broker that is down.
func TestCheckAsksTheProcessor(t *testing.T) {
	t.Parallel()
	down := func(context.Context) (*amqp.Connection, error) { return nil, context.DeadlineExceeded }
	c := newConsumer(t, down, &checked{}, config{})
	if err := c.Check(t.Context()); !errors.Is(err, errBroken) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Check returned %v", err)
	}
}

// A retry queue that returns its messages at another time, or elsewhere, is found; one of
// another type that does right is not.
func TestCheckRetryQueues(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	for name, args := range map[string]amqp.Table{
		"orders.retry.80":  {"x-message-ttl": int64(80), "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "orders", "x-queue-type": "classic"},
		"orders.retry.100": {"x-message-ttl": int64(999), "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "orders", "x-queue-type": "classic"},
		"orders.retry.120": {"x-message-ttl": int64(120), "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "elsewhere", "x-queue-type": "quorum"},
	} {
		b.Queue(t, name, args)
	}
	got := findings(t, afterSetup(t, b, config{Retry: quick}))
	if len(got) != 2 || !strings.Contains(got[0].Error(), "retry.100") || !strings.Contains(got[0].Error(), "x-message-ttl") ||
		!strings.Contains(got[1].Error(), "retry.120") {
		t.Errorf("findings %v", got)
	}
}
