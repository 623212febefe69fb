package inboxamqp

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/ids"
)

// stubborn returns only when it is released; it notes when, and why, its context ended.
type stubborn struct {
	release chan struct{}
	ended   time.Time
	cause   error
}

func (p *stubborn) Process(ctx context.Context, msgs []*inbox.Message) []error {
	<-ctx.Done()
	p.ended, p.cause = time.Now(), context.Cause(ctx)
	if p.release != nil {
		<-p.release
	}
	return same(len(msgs), context.Cause(ctx))
}

// endOf returns how long a run takes to end that has a message in hand, and for how long after the
// stop its handler's context lived.
func endOf(t *testing.T, cfg inbox.ConsumerConfig, p *stubborn, then func()) (whole, handler time.Duration) {
	t.Helper()
	refused := func(context.Context) (*amqp.Connection, error) { return nil, errors.New("refused") }
	cfg.Logger = slog.New(slog.DiscardHandler)
	c, err := NewConsumer(refused, "orders", p, Config{ConsumerConfig: cfg})
	if err != nil {
		t.Fatal(err)
	}
	r := c.newRun(t.Context())
	ch := &channel{signals: c.signals}
	ch.over.Store(true) // nothing can be settled
	d := &delivery{
		msg: &inbox.Message{ID: ids.New(), Name: "order.placed"}, ch: ch, evidence: newEvidence(1, r.mover, r.workers),
	}
	var stopped time.Time
	r.serve(func() {
		r.workers.jobs <- []*delivery{d}
		synctest.Wait()
		stopped = time.Now()
		r.life.halt()
		then()
	})
	whole = time.Since(stopped)
	synctest.Wait() // the handler may be left behind
	return whole, p.ended.Sub(stopped)
}

// The budget is 60 seconds by default, handlers and all that follows them together.
func TestShutdownTimeout(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		cfg            inbox.ConsumerConfig
		deaf           bool // to the end of its context
		hangs          bool // the end of the session
		handler, whole time.Duration
	}{
		"default":                   {inbox.ConsumerConfig{HandlerTimeout: time.Hour}, false, false, 54 * time.Second, 54 * time.Second},
		"default, deaf handler":     {inbox.ConsumerConfig{HandlerTimeout: time.Hour}, true, false, 54 * time.Second, 57 * time.Second},
		"default, session hangs":    {inbox.ConsumerConfig{HandlerTimeout: time.Hour}, true, true, 54 * time.Second, 60 * time.Second},
		"own":                       {inbox.ConsumerConfig{HandlerTimeout: time.Hour, ShutdownTimeout: 10 * time.Second}, false, false, 9 * time.Second, 9 * time.Second},
		"own, session hangs":        {inbox.ConsumerConfig{HandlerTimeout: time.Hour, ShutdownTimeout: 10 * time.Second}, true, true, 9 * time.Second, 10 * time.Second},
		"default of HandlerTimeout": {inbox.ConsumerConfig{ShutdownTimeout: time.Hour}, false, false, 60 * time.Second, 60 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				p := &stubborn{}
				if tt.deaf {
					p.release = make(chan struct{})
					defer synctest.Wait()
					defer close(p.release)
				}
				hang := make(chan struct{})
				defer close(hang)
				whole, handler := endOf(t, tt.cfg, p, func() {
					if tt.hangs {
						<-hang
					}
				})
				if whole != tt.whole || handler != tt.handler {
					t.Errorf("ended after %v, the handler's context after %v; want %v and %v", whole, handler, tt.whole, tt.handler)
				}
				if draining := errors.Is(p.cause, inbox.ErrDraining); draining == (tt.cfg.HandlerTimeout == 0) {
					t.Errorf("the context ended with %v", p.cause)
				}
			})
		})
	}
}
