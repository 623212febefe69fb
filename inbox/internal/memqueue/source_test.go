package memqueue_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/internal/memqueue"
	"github.com/holdfast-go/holdfast/internal/ids"
)

// at is a script of one outcome, of the first time at one step.
func at(step memqueue.Step, what memqueue.Outcome) memqueue.Fault {
	done := false
	return func(s memqueue.Step, _ *inbox.Message) memqueue.Outcome {
		if s != step || done {
			return memqueue.OK
		}
		done = true
		return what
	}
}

// history takes two messages and settles them, the first by a move, and says what happened until the queue was idle.
func history(t *testing.T, fault memqueue.Fault) string {
	t.Helper()
	broker := memqueue.NewBroker()
	queue := broker.Queue("orders")
	source := queue.Source(memqueue.Options{Fault: fault})
	for _, name := range []string{"a", "b"} {
		if err := queue.Put(&inbox.Message{ID: ids.New(), Name: name}); err != nil {
			t.Fatal(err)
		}
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	go source.Run(ctx)
	synctest.Wait()
	var trail []string
	note := func(what string, err error) bool {
		if err != nil {
			what += " fails"
		}
		trail = append(trail, what)
		return err == nil
	}
	begin := time.Now()
	once := func() (goesOn bool) {
		s, err := source.Open(ctx)
		if !note("open", err) {
			return true
		}
		defer func() { note("close", s.Close(ctx)) }()
		if !note("start", s.Start(ctx, 1)) {
			return true
		}
		for {
			short, end := context.WithTimeout(ctx, 100*time.Millisecond)
			ds, err := s.Receive(short, 10)
			end()
			if errors.Is(err, context.DeadlineExceeded) {
				return !note("stop", s.Stop(ctx))
			}
			if err != nil {
				note("receive", err)
				return true
			}
			for _, d := range ds {
				m := d.Message()
				trail = append(trail, fmt.Sprintf("%s%d", m.Name, m.Attempt))
				if m.Redelivered {
					trail[len(trail)-1] += "r"
				}
				if m.Name == "a" && m.Attempt == 1 {
					move := driver.Move{Delivery: d, Target: driver.ToLater, Delay: 50 * time.Millisecond, Next: driver.Progress{Attempt: 2}}
					note("move", source.Move(ctx, []driver.Move{move})[0])
					continue
				}
				if !note("ack", s.Ack(ctx, []driver.Delivery{d}, false)) {
					return true
				}
			}
		}
	}
	for range 5 {
		if !once() {
			break
		}
	}
	if err := broker.Idle(ctx); err != nil {
		t.Error(err)
	}
	return fmt.Sprintf("%s in %v", strings.Join(trail, ", "), time.Since(begin).Truncate(time.Second))
}

func TestFaults(t *testing.T) {
	t.Parallel()
	const begin, rest = "open, start, ", "b1, ack, a2, ack, stop, close in 0s"
	for name, tt := range map[string]struct {
		step memqueue.Step
		what memqueue.Outcome
		want string
	}{
		"none":                  {memqueue.Open, memqueue.OK, begin + "a1, move, " + rest},
		"open fails":            {memqueue.Open, memqueue.FailBefore, "open fails, " + begin + "a1, move, " + rest},
		"open's reply is lost":  {memqueue.Open, memqueue.FailAfter, "open fails, " + begin + "a1, move, " + rest},
		"start hangs":           {memqueue.Start, memqueue.Hang, "open, start fails, close, " + begin + "a1, move, " + strings.Replace(rest, "0s", "10s", 1)},
		"receive fails":         {memqueue.Receive, memqueue.FailBefore, begin + "receive fails, close, " + begin + "a1r, move, " + rest},
		"receive loses one":     {memqueue.Receive, memqueue.Lose, begin + "a1r, move, " + rest},
		"lost when received":    {memqueue.Receive, memqueue.EndSession, begin + "a1, move fails, receive fails, close, " + begin + "a1r, move, " + rest},
		"ack fails":             {memqueue.Ack, memqueue.FailBefore, begin + "a1, move, b1, ack fails, close, " + begin + "b1r, ack, a2, ack, stop, close in 0s"},
		"ack's reply is lost":   {memqueue.Ack, memqueue.FailAfter, begin + "a1, move, b1, ack fails, close, " + begin + "a2, ack, stop, close in 0s"},
		"ack is lost":           {memqueue.Ack, memqueue.Lose, begin + "a1, move, b1, ack, b1r, ack, a2, ack, stop, close in 0s"},
		"move's reply is lost":  {memqueue.Move, memqueue.FailAfter, begin + "a1, move fails, " + rest},
		"lost after a move":     {memqueue.Move, memqueue.EndSession, begin + "a1, move, receive fails, close, " + begin + rest},
		"stop fails":            {memqueue.Stop, memqueue.FailBefore, begin + "a1, move, b1, ack, a2, ack, stop fails, close, " + begin + "stop, close in 0s"},
		"close's reply is lost": {memqueue.Close, memqueue.FailAfter, begin + "a1, move, b1, ack, a2, ack, stop, close fails in 0s"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				if got := history(t, at(tt.step, tt.what)); got != tt.want {
					t.Errorf("got  %s\nwant %s", got, tt.want)
				}
			})
		})
	}
}
