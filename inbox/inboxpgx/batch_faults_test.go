package inboxpgx_test

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// A handler's Timeout ends its own call and no other's.
func TestBatchTimeout(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p, entries := fakeStoreWith(t, inboxpgx.HandlerConfig{Timeout: time.Minute})
		handle(t, p, func(ctx context.Context, _ pgx.Tx, e conformance.Event) error {
			if e.Number == 1 {
				<-ctx.Done()
				return context.Cause(ctx)
			}
			return nil
		})
		msgs := events(3)
		results := p.Process(t.Context(), msgs)
		if got := failedOnes(results); !slices.Equal(got, []int{1}) || !driver.Classify(results[1]).Counted {
			t.Errorf("results %v", results)
		}
		if !entries.Seen("a", msgs[0].ID) || entries.Seen("a", msgs[1].ID) || !entries.Seen("a", msgs[2].ID) {
			t.Error("entries of the wrong messages")
		}
	})
}

// A fault of the database is nobody's: all come again, uncounted.
func TestBatchUnavailable(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]txretrytest.Fault{
		"cannot begin":            {Point: txretrytest.AtBegin, SQLSTATE: "57P03"},
		"reply to COMMIT is lost": {Point: txretrytest.ReplyLostApplied},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, _ := fakeStore(t, fault)
			runs := 0
			handle(t, p, func(context.Context, pgx.Tx, conformance.Event) error { runs++; return nil })
			msgs := events(5)
			for _, err := range p.Process(t.Context(), msgs) {
				if f := driver.Classify(err); !f.Unavailable || f.Counted {
					t.Errorf("%v classified %+v", err, f)
				}
			}
			if err := errors.Join(p.Process(t.Context(), msgs)...); err != nil || runs != 5 {
				t.Errorf("%d runs, error %v", runs, err)
			}
		})
	}
}

// A handler that exits its goroutine leaves nobody behind.
func TestBatchGoexit(t *testing.T) {
	t.Parallel()
	for _, where := range []string{"prepare", "handler"} {
		synctest.Test(t, func(t *testing.T) {
			p, _ := fakeStore(t)
			exit := func(at string, e conformance.Event) {
				if at == where && e.Number == 1 {
					runtime.Goexit()
				}
			}
			err := inboxpgx.HandlePrepared(p, conformance.Name,
				func(_ context.Context, e conformance.Event) (int, error) { exit("prepare", e); return 0, nil },
				func(_ context.Context, _ pgx.Tx, e conformance.Event, _ int) error { exit("handler", e); return nil })
			if err != nil {
				t.Fatal(err)
			}
			ended := make(chan []error, 1)
			go func() {
				defer close(ended)
				ended <- p.Process(t.Context(), events(3))
			}()
			results := <-ended
			if where == "prepare" && !slices.Equal(failedOnes(results), []int{1}) {
				t.Errorf("results %v", results)
			}
			if where == "handler" && results != nil {
				t.Errorf("results %v of a goroutine that has exited", results)
			}
		})
	}
}
