package inboxpgx_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// hanging handles messages, one of which waits for something else until its context ends.
type hanging struct {
	number int
	gate   chan struct{} // the message 0 waits for it

	mu    sync.Mutex
	taken []int // of those that took effect
}

func newHanging(number int) *hanging { return &hanging{number: number, gate: make(chan struct{})} }

func (h *hanging) do(ctx context.Context, tx pgx.Tx, numbers ...int) error {
	for _, n := range numbers {
		switch n {
		case 0:
			<-h.gate
		case h.number:
			<-ctx.Done()
			return ctx.Err()
		}
		txretry.AfterCommit(tx, func() {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.taken = append(h.taken, n)
		})
	}
	return nil
}

// effects are the numbers of those that took effect, sorted.
func (h *hanging) effects() []int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Sorted(slices.Values(h.taken))
}

func (h *hanging) register(t *testing.T, s *inboxpgx.Store, many bool) {
	t.Helper()
	if !many {
		handle(t, s, func(ctx context.Context, tx pgx.Tx, e conformance.Event) error { return h.do(ctx, tx, e.Number) })
		return
	}
	err := inboxpgx.HandleBatch(s, conformance.Name, func(ctx context.Context, tx pgx.Tx, items []inboxpgx.Item[conformance.Event]) error {
		var numbers []int
		for _, item := range items {
			numbers = append(numbers, item.Value.Number)
		}
		return h.do(ctx, tx, numbers...)
	})
	noError(t, err)
}

// others are the numbers below n but for one.
func others(n, but int) (all []int) {
	for i := range n {
		if i != but {
			all = append(all, i)
		}
	}
	return all
}

// consumeHanging runs a consumer on n messages, all but the first of which come as one batch, until all have taken effect
// but for the one that hangs, which alone is a dead letter then.
func consumeHanging(t *testing.T, s *inboxpgx.Store, many bool, n int, timeout time.Duration) {
	t.Helper()
	h := newHanging(n / 2)
	h.register(t, s, many)
	broker := inboxtest.NewBroker()
	var received atomic.Int64
	consumer, err := inboxtest.NewConsumer(broker, "orders", s, inboxtest.Config{
		ConsumerConfig: inbox.ConsumerConfig{
			Concurrency: 1, Batch: n, HandlerTimeout: timeout, Retry: inbox.RetryPolicy{MaxAttempts: 1}, Logger: slog.New(slog.DiscardHandler),
		},
		Fault: func(at inboxtest.Step, _ *inbox.Message) inboxtest.Outcome {
			if at == inboxtest.AtReceive && received.Add(1) == int64(n) {
				close(h.gate)
			}
			return inboxtest.OK
		},
	})
	noError(t, err)
	for _, m := range events(n) {
		noError(t, broker.Send(t.Context(), m))
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- consumer.Run(ctx) }()
	err = broker.Idle(t.Context())
	letters, listed := consumer.DeadLetters().List(t.Context(), inbox.Filter{Limit: n})
	noError(t, errors.Join(err, listed))
	if len(letters) != 1 || string(letters[0].Message.Body) != fmt.Sprintf(`{"number":%d}`, h.number) {
		t.Errorf("%d dead letters, want the one that hangs", len(letters))
	}
	if got := h.effects(); !slices.Equal(got, others(n, h.number)) {
		t.Errorf("effects of %v", got)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// A handler that hangs is the failure of its message alone, and keeps the others waiting for minutes at most.
func TestBatchWithOneThatHangs(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		many bool
		most time.Duration
	}{
		"a call for each": {false, 2 * time.Minute}, // without savepoints, and with them
		"one call":        {true, 11 * time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s, _ := fakeStore(t)
				began := time.Now()
				consumeHanging(t, s, tt.many, 200, time.Minute)
				if took := time.Since(began); took > tt.most {
					t.Errorf("took %v, want %v at most", took, tt.most)
				}
			})
		})
	}
}

// The last of a batch that was divided may have no time left: it is tried again, too.
func TestBatchTimeIsOverForTheLast(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, entries := fakeStore(t, txretrytest.Fault{Point: txretrytest.AtCommit, SQLSTATE: "23503"})
		calls := 0
		handle(t, s, func(ctx context.Context, _ pgx.Tx, e conformance.Event) error {
			if calls++; e.Number == 1 && calls > 2 {
				<-ctx.Done()
			}
			return ctx.Err()
		})
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		msgs := events(2)
		results := s.Process(ctx, msgs)
		if f := driver.Classify(results[1]); results[0] != nil || f.Counted || !f.Unavailable || !entries.Seen("a", msgs[0].ID) {
			t.Errorf("results %v", results)
		}
	})
}
