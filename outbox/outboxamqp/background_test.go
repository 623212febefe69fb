package outboxamqp_test

import (
	"context"
	"log/slog"
	"runtime"
	"sync"
	"testing"

	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
)

// exits is a log handler that ends the goroutine of the caller.
type exits struct{ slog.Handler }

func (e exits) Handle(context.Context, slog.Record) error {
	runtime.Goexit()
	return nil
}

func (e exits) WithAttrs([]slog.Attr) slog.Handler { return e }

// The Done channel of context.Background is nil, and Run works on it like on any other.
func TestRunOnBackground(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Queue(t, "q", nil)
	// Nothing ends Run but the log line about a lost connection.
	p, err := outboxamqp.NewPublisher(b.Dial, outboxamqp.Config{Logger: slog.New(exits{slog.Default().Handler()})})
	if err != nil {
		t.Fatal(err)
	}
	var running sync.WaitGroup
	running.Go(func() {
		if err := p.Run(context.Background()); err != nil {
			t.Error(err)
		}
	})
	testenv.Eventually(t, func() error { return publish(t, p, message(t, "q")) })
	if err := p.Ready(t.Context()); err != nil {
		t.Error(err)
	}
	b.CloseConnections(t)
	running.Wait()
}
