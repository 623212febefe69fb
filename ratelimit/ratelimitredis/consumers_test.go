package ratelimitredis_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"

	"github.com/redis/go-redis/v9"
)

const (
	consumerURL = "HOLDFAST_RATELIMIT_CONSUMER_URL"
	mails       = "mails" // the stream
	sentMails   = "sent"  // a list
	someMails   = 100
	// mailTimeout is so short that the workers of 3 processes together wait for longer than half of it.
	mailTimeout = 30 * time.Second
	mailWorkers = 16
)

// mailRate stands for 100 a minute, over all processes, in a test that takes less than one.
var mailRate = ratelimit.Limit{Name: "mail", Max: 25, Window: 10 * time.Second, Algorithm: ratelimit.TokenBucket, Burst: 1}

// sentMail is what a handler notes.
type sentMail struct {
	ID      string
	Process string
	Attempt int
	Left    time.Duration // until the end of the handler's time
}

// Handlers that share a limit over several processes run at its pace, however many workers wait. What
// waits for longer than half of its time comes again: no message has failed, and none is lost.
func TestConsumersOfManyProcessesShareALimit(t *testing.T) {
	t.Parallel()
	url := redistest.URL(t)
	client := redistest.Client(t, url)
	for range someMails {
		values := []any{"id", ids.New().String(), "name", "mail.requested", "body", "{}"}
		if err := client.XAdd(t.Context(), &redis.XAddArgs{Stream: mails, Values: values}).Err(); err != nil {
			t.Fatal(err)
		}
	}
	tallies := runProcesses(t, 3, "TestConsumerOfMany", consumerURL+"="+url)
	checkTally(t, mailRate, tallies[mailRate.Name])

	perMessage, perProcess := map[string]int{}, map[string]int{}
	for _, text := range client.LRange(t.Context(), sentMails, 0, -1).Val() {
		var m sentMail
		if err := json.Unmarshal([]byte(text), &m); err != nil {
			t.Fatal(err)
		}
		perMessage[m.ID]++
		perProcess[m.Process]++
		if m.Attempt != 1 {
			t.Errorf("a message has failed: attempt %d", m.Attempt)
		}
		if m.Left < mailTimeout/6 { // half of it less what a busy machine takes between the wait and the handler
			t.Errorf("a handler began with %v left of %v", m.Left, mailTimeout)
		}
	}
	if len(perMessage) != someMails || len(perProcess) != 3 {
		t.Errorf("%d messages sent by %d processes, want %d by 3", len(perMessage), len(perProcess), someMails)
	}
	granted := int64(0)
	for _, n := range tallies[mailRate.Name] {
		granted += n.allowed
	}
	if granted != someMails {
		t.Errorf("%d were admitted for %d messages", granted, someMails)
	}
}

// TestConsumerOfMany is one of the processes of TestConsumersOfManyProcessesShareALimit.
func TestConsumerOfMany(t *testing.T) {
	url := os.Getenv(consumerURL)
	if url == "" {
		return // not a process of many
	}
	client := redistest.Client(t, url)
	limiter := &counting{Limiter: open(t, client, ratelimitredis.Config{DenyCache: -1}), counts: map[int64]tally{}}
	turn, err := ratelimit.NewWaiter(limiter, []ratelimit.Charge{{Limit: mailRate}}, ratelimit.WaiterConfig{})
	if err != nil {
		t.Fatal(err)
	}
	mux := inbox.NewMux()
	err = inbox.Handle(mux, "mail.requested", func(ctx context.Context, _ struct{}) error {
		m, _ := inbox.FromContext(ctx)
		deadline, _ := ctx.Deadline()
		text, err := json.Marshal(sentMail{m.ID.String(), os.Getenv(childID), m.Attempt, time.Until(deadline)})
		return errors.Join(err, client.RPush(ctx, sentMails, text).Err())
	}, inbox.Blocking(turn))
	if err != nil {
		t.Fatal(err)
	}
	consumer, err := inboxredis.NewConsumer(client, mails, mux, inboxredis.Config{ConsumerConfig: inbox.ConsumerConfig{
		Concurrency: mailWorkers, HandlerTimeout: mailTimeout, Logger: slog.New(slog.DiscardHandler),
		Retry: inbox.RetryPolicy{BaseDelay: 100 * time.Millisecond},
	}})
	if err == nil {
		err = consumer.Setup(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	ctx, end := context.WithCancel(t.Context())
	defer end()
	ended := make(chan error, 1)
	go func() { ended <- consumer.Run(ctx) }()
	testenv.Eventually(t, func() error {
		if n := client.LLen(ctx, sentMails).Val(); n < someMails {
			return fmt.Errorf("%d of %d messages sent", n, someMails)
		}
		return nil
	})
	end()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	write(t, map[string]map[int64]tally{mailRate.Name: limiter.counts})
}

// counting counts the decisions of a limiter by their time. It waits for each one: what a caller that has
// gone was granted counts, too.
type counting struct {
	ratelimit.Limiter
	mu     sync.Mutex
	counts map[int64]tally
}

func (n *counting) Allow(ctx context.Context, charges ...ratelimit.Charge) (ratelimit.Decision, error) {
	d, err := n.Limiter.Allow(context.WithoutCancel(ctx), charges...)
	if err != nil {
		return d, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	sum := n.counts[d.At.UnixMilli()]
	if d.Allowed {
		sum.allowed++
	} else {
		sum.denied++
	}
	n.counts[d.At.UnixMilli()] = sum
	return d, nil
}
