package memqueue_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/inbox/internal/memqueue"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/trace/parked"
)

// at returns a script with one outcome, for the first call of one step.
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

// history receives two messages and settles them, the first by a move. It returns the events until the queue
// was idle.
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

// network breaks the calls of all sources of a queue.
type network struct {
	queue   *memqueue.Queue
	outcome atomic.Int64
}

func (n *network) CutConnections() { n.queue.Cut() }
func (n *network) Pause()          { n.outcome.Store(int64(memqueue.Hang)) }
func (n *network) DropReplies()    { n.outcome.Store(int64(memqueue.FailAfter)) }
func (n *network) Heal()           { n.outcome.Store(int64(memqueue.OK)) }

func (n *network) fault(_ memqueue.Step, _ *inbox.Message) memqueue.Outcome {
	return memqueue.Outcome(n.outcome.Load())
}

func TestSource(t *testing.T) {
	t.Parallel()
	for name, exclusive := range map[string]bool{"shared": false, "exclusive": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conformance.TestSource(t, conformance.SourceBackend{Runs: conformance.Runs{Bubble: true}, New: func(*testing.T) conformance.SourceFixture {
				return fixture(exclusive)
			}})
		})
	}
}

func fixture(exclusive bool) conformance.SourceFixture {
	queue := memqueue.NewBroker().Queue("orders", conformance.OwnClass)
	n := &network{queue: queue}
	source := func(*testing.T) *memqueue.Source {
		return queue.Source(memqueue.Options{Exclusive: exclusive, Fault: n.fault})
	}
	return conformance.SourceFixture{
		New:         func(t *testing.T) driver.Source { return source(t) },
		DeadLetters: func(t *testing.T) driver.DeadLetters { return source(t).DeadLetters() },
		Publish: func(t *testing.T, msgs ...*inbox.Message) {
			for _, m := range msgs {
				if err := queue.Put(m); err != nil {
					t.Fatal(err)
				}
			}
		},
		Network: n,
		Refuse: func(_ *testing.T, class string) func() {
			queue.Refuse(class, true)
			return func() { queue.Refuse(class, false) }
		},
		Delete: func(*testing.T) func() {
			queue.Delete()
			return queue.Declare
		},
	}
}

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// The run of two consumers with ParkKeys is one of the model of parked keys.
func TestParkKeys_runOfTheModel(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { parked.Test(t, fixture(true), parked.InMemory(t)) })
}
