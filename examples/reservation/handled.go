package main

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/outbox/outboxredis"
)

// handled counts the messages that a process has published or processed, and tells the flow of them.
type handled struct {
	atomic.Int64
	flow flow.Flow
	// inHand are being processed.
	inHand atomic.Int64
	// slow says how long a consumer waits before it processes messages. nil: not at all.
	slow func(ctx context.Context) time.Duration
}

func (h *handled) published(name string, done func(error)) func(error) {
	return func(err error) {
		if err == nil {
			h.Add(1)
			h.flow.Note(flow.Published, name)
		}
		done(err)
	}
}

// wait is outside of the transaction, as that of a slow network would be.
func (h *handled) wait(ctx context.Context) {
	if h.slow == nil {
		return
	}
	select {
	case <-ctx.Done(): // the store gives the messages back
	case <-time.After(h.slow(ctx)):
	}
}

// Each of these embeds a part whole: relays and consumers look for what else it can do.
type (
	countedAMQP struct {
		*outboxamqp.Publisher
		handled *handled
	}
	countedRedis struct {
		*outboxredis.Publisher
		handled *handled
	}
	countedInbox struct {
		*inboxpgx.Store
		handled *handled
	}
)

// Publish counts what is confirmed.
func (p countedAMQP) Publish(ctx context.Context, m driver.Message, done func(error)) {
	p.Publisher.Publish(ctx, m, p.handled.published(m.Name, done))
}

// Publish counts what is confirmed.
func (p countedRedis) Publish(ctx context.Context, m driver.Message, done func(error)) {
	p.Publisher.Publish(ctx, m, p.handled.published(m.Name, done))
}

// Process counts what has gone well.
func (s countedInbox) Process(ctx context.Context, msgs []*inbox.Message) []error {
	s.handled.inHand.Add(int64(len(msgs)))
	defer s.handled.inHand.Add(-int64(len(msgs)))
	s.handled.wait(ctx)
	results := s.Store.Process(ctx, msgs)
	for i, err := range results {
		if err == nil {
			s.handled.Add(1)
		}
		flow.NoteAttempt(s.handled.flow, msgs[i].Name, msgs[i].Attempt, err)
	}
	return results
}
