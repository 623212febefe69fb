package inboxamqp_test

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// Retries and the dead letter keep the properties of AMQP that are the sender's, and drop those that would
// lose the copy or be mistaken for the broker's.
func TestRetries(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	got := recorder{fail: func(*inbox.Message) error { return errBroken }}
	consume(t, b, &got, config{Queue: "orders", Retry: quick})
	p := order()
	p.Headers = amqp.Table{"tenant": "a", "x-death": "mine"}
	p.Expiration = "60000"
	b.Publish(t, "", "orders", p)
	dead := b.Take(t, "failed.default", 1, testenv.Patience)[0]
	if n := len(got.messages()); n != 4 {
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
	dead := b.Take(t, "failed.default", 1, testenv.Patience)[0]
	before := len(got.messages())
	b.Publish(t, "", "orders", amqp.Publishing{
		Headers: dead.Headers, MessageId: dead.MessageId, Type: dead.Type, ContentType: dead.ContentType, DeliveryMode: 2, Body: dead.Body,
	})
	for i, m := range got.await(t, before+2)[before:] {
		if m.Attempt != i+1 || m.Replays != 1 {
			t.Errorf("delivery %d: attempt %d, replays %d", i, m.Attempt, m.Replays)
		}
	}
	again := b.Take(t, "failed.default", 1, testenv.Patience)[0]
	if again.Headers["holdfast-attempt"] != "2" || again.Headers["holdfast-replays"] != "1" {
		t.Errorf("headers %v", again.Headers)
	}
	r.stop(t)
}
