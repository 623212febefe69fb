package joined_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/inbox/internal/joined"
	"github.com/holdfast-go/holdfast/inbox/internal/memqueue"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// parts are the queues of a broker.
type parts struct {
	queues  []*memqueue.Queue
	options memqueue.Options
}

func newParts(o memqueue.Options) *parts {
	broker := memqueue.NewBroker()
	p := &parts{options: o}
	for i := range 3 {
		p.queues = append(p.queues, broker.Queue(fmt.Sprint("orders.", i), conformance.OwnClass))
	}
	return p
}

func (p *parts) source() *joined.Source {
	var all []driver.Source
	for _, q := range p.queues {
		all = append(all, q.Source(p.options))
	}
	return joined.New(all...)
}

// put puts messages with these names into the queues, as many into each as there are.
func (p *parts) put(t *testing.T, names ...string) {
	t.Helper()
	for i, name := range names {
		noError(t, p.queues[i%len(p.queues)].Put(&inbox.Message{ID: ids.New(), Name: name}))
	}
}

// network breaks the calls of all parts.
type network struct {
	*parts
	outcome atomic.Int64
}

func (n *network) CutConnections() {
	for _, q := range n.queues {
		q.Cut()
	}
}
func (n *network) Pause()       { n.outcome.Store(int64(memqueue.Hang)) }
func (n *network) DropReplies() { n.outcome.Store(int64(memqueue.FailAfter)) }
func (n *network) Heal()        { n.outcome.Store(int64(memqueue.OK)) }

// Where all messages are of one part, the whole is a source like any other.
func TestSource(t *testing.T) {
	t.Parallel()
	for name, o := range map[string]memqueue.Options{"shared": {}, "exclusive": {Exclusive: true}, "split": {Split: true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conformance.TestSource(t, conformance.SourceBackend{Runs: conformance.Runs{Bubble: true}, New: func(*testing.T) conformance.SourceFixture {
				return fixture(o)
			}})
		})
	}
}

func fixture(o memqueue.Options) conformance.SourceFixture {
	n := &network{}
	o.Fault = func(memqueue.Step, *inbox.Message) memqueue.Outcome { return memqueue.Outcome(n.outcome.Load()) }
	n.parts = newParts(o)
	queue := n.queues[1]
	return conformance.SourceFixture{
		New:         func(*testing.T) driver.Source { return n.source() },
		DeadLetters: func(*testing.T) driver.DeadLetters { return n.source().DeadLetters() },
		Publish: func(t *testing.T, msgs ...*inbox.Message) {
			for _, m := range msgs {
				noError(t, queue.Put(m))
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

// begun is a session of all parts.
func begun(t *testing.T, p *parts, window int) driver.Session {
	t.Helper()
	s, err := p.source().Open(t.Context())
	noError(t, err)
	noError(t, s.Start(t.Context(), window))
	return s
}

// take receives once, when all that can come is there.
func take(t *testing.T, s driver.Session, most int) []driver.Delivery {
	t.Helper()
	synctest.Wait()
	ds, err := s.Receive(t.Context(), most)
	noError(t, err)
	return ds
}

func named(ds []driver.Delivery) string {
	var all []string
	for _, d := range ds {
		all = append(all, d.Message().Name)
	}
	return strings.Join(all, " ")
}

// The window is that of all parts together, and each of them has its turn.
func TestParts(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newParts(memqueue.Options{Exclusive: true})
		p.put(t, "a1", "b1", "c1", "a2", "b2", "c2", "a3", "b3", "c3")
		s := begun(t, p, 4)
		first := take(t, s, 1)
		second := take(t, s, 10) // all parts have received by now
		four := strings.Fields(named(append(first, second...)))
		slices.Sort(four)
		if got := strings.Join(four, ""); !slices.Contains([]string{"a1a2b1c1", "a1b1b2c1", "a1b1c1c2"}, got) {
			t.Errorf("handed out %s", got)
		}
		noError(t, s.Ack(t.Context(), []driver.Delivery{first[0], second[1]}, false))
		if got := named(take(t, s, 10)); len(strings.Fields(got)) != 2 {
			t.Errorf("two are settled, and %s came", got)
		}
		noError(t, s.Close(t.Context()))
		next := begun(t, p, 100)
		var all []driver.Delivery
		for len(all) < 7 {
			all = append(all, take(t, next, 100)...)
		}
		of := map[byte][]string{}
		for _, d := range all {
			name := d.Message().Name
			of[name[0]] = append(of[name[0]], name)
		}
		for part, names := range of {
			if !slices.IsSorted(names) {
				t.Errorf("part %c came again as %v", part, names)
			}
		}
		noError(t, errors.Join(next.Ack(t.Context(), all, false), next.Close(t.Context())))
	})
}

// What was received ahead goes back when the deliveries stop.
func TestStopGivesBackWhatIsAhead(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newParts(memqueue.Options{})
		p.put(t, "a1", "b1", "c1", "a2", "b2", "c2")
		s, other := begun(t, p, 1), begun(t, p, 10)
		synctest.Wait()
		mine := take(t, s, 1)
		noError(t, s.Stop(t.Context()))
		var theirs []driver.Delivery
		for len(theirs) < 5 {
			theirs = append(theirs, take(t, other, 10)...)
		}
		noError(t, errors.Join(s.Ack(t.Context(), mine, false), other.Ack(t.Context(), theirs, false), s.Close(t.Context()), other.Close(t.Context())))
	})
}

// After the context of a Receive nothing more is taken for a session.
func TestNothingIsTakenAfterReceive(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newParts(memqueue.Options{})
		s := begun(t, p, 10)
		p.put(t, "a1")
		ctx, end := context.WithCancel(t.Context())
		ds, err := s.Receive(ctx, 1)
		noError(t, err)
		end()
		synctest.Wait()
		p.put(t, "a2", "b2", "c2")
		other := begun(t, p, 10)
		var all []driver.Delivery
		for len(all) < 3 {
			all = append(all, take(t, other, 10)...)
		}
		ctx, end = context.WithCancel(t.Context()) // another one has them go on
		defer end()
		p.put(t, "a3")
		if got := named(append(take(t, other, 1), ds...)); got != "a3 a1" {
			t.Errorf("received %s", got)
		}
		noError(t, other.Close(t.Context()))
		if again, err := s.Receive(ctx, 10); err != nil || len(again) == 0 {
			t.Errorf("received %s, %v", named(again), err)
		}
		noError(t, s.Close(t.Context()))
	})
}

// The end of one part's session is that of all, and one part that cannot begin keeps the others from it.
func TestOnePartEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newParts(memqueue.Options{Exclusive: true})
		s := begun(t, p, 4)
		p.put(t, "a1")
		held := take(t, s, 1)
		p.queues[2].Cut()
		if ds, err := s.Receive(t.Context(), 1); err == nil {
			t.Errorf("one part is lost, and %s came", named(ds))
		}
		noError(t, s.Close(t.Context()))
		if err := s.Ack(t.Context(), held, false); !errors.Is(err, driver.ErrStale) {
			t.Errorf("acknowledged after the end: %v", err)
		}
		p.queues[2].Delete()
		source := p.source()
		for range 2 { // the others are not left open
			if _, err := source.Open(t.Context()); !errors.Is(err, driver.ErrMissing) {
				t.Errorf("opened without a part: %v", err)
			}
		}
		p.queues[2].Declare()
		again, err := source.Open(t.Context())
		noError(t, err)
		noError(t, again.Close(t.Context()))
	})
}

// Dead letters of a class are counted together, and looked at part by part.
func TestLetters(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newParts(memqueue.Options{})
		source := p.source()
		go source.Run(t.Context())
		synctest.Wait()
		p.put(t, "a1", "b1", "c1")
		s, err := source.Open(t.Context())
		noError(t, err)
		noError(t, s.Start(t.Context(), 10))
		for range 3 {
			for _, d := range take(t, s, 1) {
				letter := inbox.DeadLetter{Message: *d.Message(), Class: conformance.OwnClass}
				move := driver.Move{Delivery: d, Target: driver.ToDead, Letter: letter}
				noError(t, source.Move(t.Context(), []driver.Move{move})[0])
			}
		}
		letters := source.DeadLetters()
		depths, err := letters.Depths(t.Context())
		noError(t, err)
		for _, d := range depths {
			if want := map[bool]int{true: 3}[d.Class == conformance.OwnClass]; d.Messages != want {
				t.Errorf("class %s has %d letters", d.Class, d.Messages)
			}
		}
		var seen []string
		err = letters.Scan(t.Context(), conformance.OwnClass, func(dead *inbox.DeadLetter) (driver.Outcome, error) {
			if seen = append(seen, dead.Message.Name); len(seen) == 2 {
				return driver.Return, driver.ErrDone
			}
			return driver.Return, nil
		}, func(_ inbox.DeadLetter, err error) { t.Error(err) })
		if err != nil || strings.Join(seen, " ") != "a1 b1" {
			t.Errorf("looked at %v, %v", seen, err)
		}
		if back := take(t, s, 1)[0].Message(); back.Name != "a1" || back.Queue != "orders.0" {
			t.Errorf("%s is back in %s", back.Name, back.Queue)
		}
		noError(t, s.Close(t.Context()))
	})
}

// held are dead letters of which another session has one in hand, and another one is there.
type held struct{}

func (held) Depths(context.Context) ([]driver.Depth, error) {
	return []driver.Depth{{Class: "default", Messages: 1, Held: true}}, nil
}

func (held) Scan(_ context.Context, _ string, visit func(*inbox.DeadLetter) (driver.Outcome, error), _ func(inbox.DeadLetter, error)) error {
	if _, err := visit(&inbox.DeadLetter{}); errors.Is(err, driver.ErrDone) {
		return nil
	}
	return inbox.ErrHeld
}

// A place of which a part cannot be seen does not hide the others, and a call that ends at a later place has
// not seen all of an earlier one.
func TestPartOfTheLetters(t *testing.T) {
	t.Parallel()
	l := driver.JoinDeadLetters(held{}, held{})
	if depths, err := l.Depths(t.Context()); len(depths) != 1 || depths[0].Messages != 2 || !depths[0].Held || err != nil {
		t.Errorf("%+v, error %v", depths, err)
	}
	for _, end := range []error{nil, driver.ErrDone} {
		seen := 0
		err := l.Scan(t.Context(), "default", func(*inbox.DeadLetter) (driver.Outcome, error) {
			if seen++; seen == 2 {
				return driver.Keep, end
			}
			return driver.Keep, nil
		}, func(inbox.DeadLetter, error) {})
		if seen != 2 || !errors.Is(err, inbox.ErrHeld) {
			t.Errorf("ended by %v: %d letters, error %v", end, seen, err)
		}
	}
}

func noError(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
