package inboxamqp_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
	"github.com/holdfast-go/holdfast/internal/amqptest"
)

func TestRetries(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	type try struct {
		attempt int
		at      time.Time
	}
	tries := make(chan try, 10)
	r := consume(t, b, processorFunc(func(_ context.Context, m *inbox.Message) error {
		tries <- try{m.Attempt, time.Now()}
		return errBroken
	}), config{Queue: "orders", Retry: quick})
	p := order()
	p.Headers = amqp.Table{"tenant": "a", "x-death": "mine"}
	p.Expiration = "60000"
	b.Publish(t, "", "orders", p)
	dead := b.Take(t, "failed.default", 1, patience)[0]
	r.stop(t)
	close(tries)
	n := 0
	var last time.Time
	for got := range tries {
		n++
		if got.attempt != n {
			t.Errorf("try %d has the attempt %d", n, got.attempt)
		}
		if least := 80 * time.Millisecond << max(n-2, 0); n > 1 && got.at.Sub(last) < least {
			t.Errorf("try %d came after %v, before %v", n, got.at.Sub(last), least)
		}
		last = got.at
	}
	if n != 4 {
		t.Errorf("%d tries, want 4", n)
	}
	if dead.Headers["holdfast-attempt"] != "4" || dead.Headers["holdfast-error"] != "broken" || dead.Headers["tenant"] != "a" ||
		dead.MessageId != p.MessageId || dead.Type != p.Type || !dead.Timestamp.Equal(p.Timestamp) || dead.Expiration != "" {
		t.Errorf("dead letter %+v", dead)
	}
	first, err1 := time.Parse(time.RFC3339Nano, dead.Headers["holdfast-first-failed-at"].(string))
	final, err2 := time.Parse(time.RFC3339Nano, dead.Headers["holdfast-last-failed-at"].(string))
	if err := errors.Join(err1, err2); err != nil || !final.After(first) {
		t.Errorf("first failure %v, last %v: %v", first, final, err)
	}
	awaitDepth(t, b, "orders", 0)
}

// Without its retry queue a message comes again, uncounted.
func TestRetryQueueMissing(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Queue(t, "orders", nil)
	var failing atomic.Bool
	failing.Store(true)
	got := recorder{fail: failWhile(&failing, errBroken)}
	r := start(t, newConsumer(t, b.Dial, &got, config{Queue: "orders", Retry: quick}))
	b.Publish(t, "", "orders", order())
	if seen := got.await(t, 2); seen[1].Attempt != 1 {
		t.Errorf("second delivery %+v", seen[1])
	}
	failing.Store(false)
	got.await(t, 3)
	r.stop(t)
	awaitDepth(t, b, "orders", 0)
	if n := len(got.messages()); n > 5 {
		t.Errorf("%d deliveries: a hot loop", n)
	}
}

// Dead letters that were moved back by other means than DeadLetters begin anew.
func TestShovelledBack(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	ledger := memory.NewLedger()
	var failing atomic.Bool
	failing.Store(true)
	got := recorder{fail: failWhile(&failing, errBroken)}
	r := consume(t, b, &got, config{Queue: "orders", Retry: inbox.RetryPolicy{MaxAttempts: 2, BaseDelay: 50 * time.Millisecond}, Ledger: ledger})
	b.Publish(t, "", "orders", order())
	dead := b.Take(t, "failed.default", 1, patience)[0]
	before := len(got.messages())
	b.Publish(t, "", "orders", amqp.Publishing{
		Headers: dead.Headers, MessageId: dead.MessageId, Type: dead.Type, ContentType: dead.ContentType, DeliveryMode: 2, Body: dead.Body,
	})
	for i, m := range got.await(t, before+2)[before:] {
		if m.Attempt != i+1 || m.Replays != 1 {
			t.Errorf("delivery %d: attempt %d, replays %d", i, m.Attempt, m.Replays)
		}
	}
	again := b.Take(t, "failed.default", 1, patience)[0]
	if again.Headers["holdfast-attempt"] != "2" || again.Headers["holdfast-replays"] != "1" {
		t.Errorf("headers %v", again.Headers)
	}
	r.stop(t)
}
