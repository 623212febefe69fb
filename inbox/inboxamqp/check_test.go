package inboxamqp_test

import (
	"strings"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/internal/amqptest"
)

// findings are what Check finds beside the topology, which is there.
func findings(t *testing.T, b *amqptest.Broker, cfg inboxamqp.Config) []inboxamqp.Finding {
	t.Helper()
	c := newConsumer(t, b.Dial, &recorder{}, cfg)
	if err := c.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	found, err := c.Check(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func TestCheckTimes(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	for name, tt := range map[string]struct {
		cfg  inboxamqp.Config
		want string // in the only finding; empty for none
	}{
		"default":               {cfg: inboxamqp.Config{}},
		"default batches":       {cfg: inboxamqp.Config{Batch: 100}},
		"retention too short":   {inboxamqp.Config{Retention: 24 * time.Hour}, "takes effect again"},
		"letters kept too long": {inboxamqp.Config{DeadLetterAge: 7 * 24 * time.Hour}, "takes effect again"},
		"retries for too long":  {inboxamqp.Config{Retry: inbox.RetryPolicy{MaxAge: 4 * 24 * time.Hour}}, "takes effect again"},
		"prefetch too large":    {inboxamqp.Config{HandlerTimeout: 15 * time.Minute}, "16 prefetched messages, 8 at once in up to 15m0s, may take longer than the 30m0s"},
		"a patient broker":      {cfg: inboxamqp.Config{HandlerTimeout: 15 * time.Minute, AckTimeout: time.Hour}},
		"batches count, too":    {inboxamqp.Config{Concurrency: 1, Batch: 100, Prefetch: 500}, "500 prefetched messages, 100 at once in up to 10m0s"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tt.cfg.Queue = "orders"
			got := findings(t, b, tt.cfg)
			switch {
			case tt.want == "" && len(got) != 0:
				t.Errorf("findings %v", got)
			case tt.want != "" && (len(got) != 1 || !strings.Contains(got[0].Problem, tt.want) || got[0].Mend == ""):
				t.Errorf("findings %v, want one with %q", got, tt.want)
			}
		})
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
	got := findings(t, b, inboxamqp.Config{Queue: "orders", Retry: quick})
	if len(got) != 2 || !strings.Contains(got[0].Problem, "retry.100") || !strings.Contains(got[0].Problem, "x-message-ttl") ||
		!strings.Contains(got[1].Problem, "retry.120") {
		t.Errorf("findings %v", got)
	}
}
