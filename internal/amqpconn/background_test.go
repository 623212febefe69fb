package amqpconn_test

import (
	"context"
	"runtime"
	"sync"
	"testing"

	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// The Done channel of context.Background is nil. A publisher that runs on it works like any other,
// also after it has lost its connection.
func TestRunOnBackground(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Queue(t, "q", nil)
	ended, last := make(chan struct{}), make(chan struct{})
	p := amqpconn.NewPublisher(amqpconn.PublisherConfig{Dial: b.Dial, Logger: quiet, Down: func(error) {
		select {
		case <-last:
			runtime.Goexit() // nothing else ends Run
		default:
		}
	}})
	var running sync.WaitGroup
	running.Go(func() {
		defer close(ended)
		p.Run(context.Background())
	})
	for _, id := range []string{"first", "after a fault"} {
		testenv.Eventually(t, func() error { return p.Confirmed(context.Background(), out("", "q", id)) })
		select {
		case <-ended:
			t.Fatal("Run has ended")
		default:
		}
		if id == "first" {
			b.CloseConnections(t)
		}
	}
	close(last)
	b.CloseConnections(t)
	running.Wait()
}
