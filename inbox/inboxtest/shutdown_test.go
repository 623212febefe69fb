package inboxtest_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
)

// The budget is 60 seconds by default, handlers and all that follows them together.
func TestShutdownTimeout(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		cfg            inbox.ConsumerConfig
		deaf           bool // to the end of its context
		hangs          inboxtest.Step
		handler, whole time.Duration
	}{
		"default":                   {inbox.ConsumerConfig{HandlerTimeout: time.Hour}, false, 0, 54 * time.Second, 54 * time.Second},
		"default, deaf handler":     {inbox.ConsumerConfig{HandlerTimeout: time.Hour}, true, 0, 54 * time.Second, 57 * time.Second},
		"default, session hangs":    {inbox.ConsumerConfig{HandlerTimeout: time.Hour}, true, inboxtest.AtClose, 54 * time.Second, 60 * time.Second},
		"default, giving back":      {inbox.ConsumerConfig{HandlerTimeout: time.Hour}, false, inboxtest.AtGiveBack, 54 * time.Second, 60 * time.Second},
		"own":                       {inbox.ConsumerConfig{HandlerTimeout: time.Hour, ShutdownTimeout: 10 * time.Second}, false, 0, 9 * time.Second, 9 * time.Second},
		"own, session hangs":        {inbox.ConsumerConfig{HandlerTimeout: time.Hour, ShutdownTimeout: 10 * time.Second}, true, inboxtest.AtClose, 9 * time.Second, 10 * time.Second},
		"default of HandlerTimeout": {inbox.ConsumerConfig{ShutdownTimeout: time.Hour}, false, 0, 60 * time.Second, 60 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var stopped, ended time.Time
			var cause error
			p := processor(func(ctx context.Context, _ *inbox.Message) error {
				<-ctx.Done()
				ended, cause = time.Now(), context.Cause(ctx)
				if tt.deaf {
					time.Sleep(time.Hour)
				}
				return cause
			})
			cfg := inboxtest.Config{ConsumerConfig: tt.cfg, Fault: func(at inboxtest.Step, _ *inbox.Message) inboxtest.Outcome {
				if at == tt.hangs {
					return inboxtest.Hang
				}
				return inboxtest.OK
			}}
			bubble(t, p, cfg, func(t *testing.T, b rig, stop func()) {
				publish(t, b, "a")
				synctest.Wait()
				stopped = time.Now()
				stop()
				whole := time.Since(stopped)
				synctest.Wait() // the handler may be left behind
				if handler := ended.Sub(stopped); whole != tt.whole || handler != tt.handler {
					t.Errorf("ended after %v, the handler's context after %v; want %v and %v", whole, handler, tt.whole, tt.handler)
				}
				if draining := errors.Is(cause, inbox.ErrDraining); draining == (tt.cfg.HandlerTimeout == 0) {
					t.Errorf("the context ended with %v", cause)
				}
				time.Sleep(2 * time.Hour) // what was left behind ends
			})
		})
	}
}
