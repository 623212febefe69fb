package main

import (
	"context"
	"sync/atomic"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/outbox/outboxredis"
)

// handled counts the messages that a process has published or processed.
type handled struct{ atomic.Int64 }

func (h *handled) published(done func(error)) func(error) {
	return func(err error) {
		if err == nil {
			h.Add(1)
		}
		done(err)
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
	p.Publisher.Publish(ctx, m, p.handled.published(done))
}

// Publish counts what is confirmed.
func (p countedRedis) Publish(ctx context.Context, m driver.Message, done func(error)) {
	p.Publisher.Publish(ctx, m, p.handled.published(done))
}

// Process counts what has gone well.
func (s countedInbox) Process(ctx context.Context, msgs []*inbox.Message) []error {
	results := s.Store.Process(ctx, msgs)
	for _, err := range results {
		if err == nil {
			s.handled.Add(1)
		}
	}
	return results
}
