package conformance

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/driver"
)

// shared are the options of calls that may share a transaction.
var shared = txretry.Options{SerialKey: "k", Combine: 10}

// line is calls that stand in line together, in this order.
type line struct {
	*fixture
	m     txretry.Transactor
	calls []caller

	runs string           // who ran, in order: a letter for each fn that was begun
	in   []driver.Session // which transaction each has run in last
	errs []error
}

// caller is one of them; zero fields have a meaning.
type caller struct {
	ctx  context.Context
	opts *txretry.Options
	fn   func(ctx context.Context, tx pgx.Tx, run int) error // run counts from 1; nil: adds its letter's value
}

func (f *fixture) line(calls ...caller) *line {
	l := &line{fixture: f, m: f.New(quick())}
	l.run(calls...)
	return l
}

// run begins with the key held by another call, so that the order in line is known.
func (l *line) run(calls ...caller) {
	f := l.fixture
	l.calls, l.in, l.errs = calls, make([]driver.Session, len(calls)), make([]error, len(calls))
	held, release := make(chan struct{}), make(chan struct{})
	var all sync.WaitGroup
	all.Go(func() {
		err := l.m.DoWith(f.Context(), txretry.Options{SerialKey: shared.SerialKey}, func(context.Context, pgx.Tx) error {
			close(held)
			<-release
			return nil
		})
		if err != nil {
			f.Errorf("the call that holds the key: %v", err)
		}
	})
	<-held
	for i, c := range calls {
		ctx := &waited{Context: f.Context(), began: make(chan struct{})}
		if c.ctx != nil {
			ctx.Context = c.ctx
		}
		all.Go(func() { l.call(ctx, i) })
		<-ctx.began
	}
	close(release)
	all.Wait()
}

// waited tells when it is first waited for: then the call is in line.
type waited struct {
	context.Context
	once  sync.Once
	began chan struct{}
}

func (w *waited) Done() <-chan struct{} {
	w.once.Do(func() { close(w.began) })
	return w.Context.Done()
}

var errNoReturn = errors.New("Do did not return")

func (l *line) call(ctx context.Context, i int) {
	c, opts, run := l.calls[i], shared, 0
	if c.opts != nil {
		opts = *c.opts
	}
	l.errs[i] = errNoReturn
	defer func() {
		if v := recover(); v != nil {
			l.errs[i] = fmt.Errorf("panic: %v", v)
		}
	}()
	l.errs[i] = l.m.DoWith(ctx, opts, func(ctx context.Context, tx pgx.Tx) error {
		run++
		l.runs += string(rune('A' + i))
		l.in[i] = sessionOf(tx)
		if c.fn != nil {
			return c.fn(ctx, tx, run)
		}
		return l.Add(ctx, tx, worth(i))
	})
}

// worth makes every set of callers that took effect a different sum.
func worth(i int) int { return 1 << i }

func sessionOf(tx pgx.Tx) (session driver.Session) {
	_ = tx.(interface {
		Statement(run func(s driver.Session) error) error
	}).Statement(func(s driver.Session) error {
		session = s
		return nil
	})
	return session
}

// ended checks the order of the runs, who succeeded and took effect, and who
// shared the transaction in which it did: "AB C" are two.
func (l *line) ended(runs, transactions string) {
	l.Helper()
	l.equal("runs", l.runs, runs)
	sum := 0
	var groups []byte
	for i, err := range l.errs {
		if err != nil {
			continue
		}
		sum += worth(i)
		if first := slices.Index(l.in[:i], l.in[i]); len(groups) > 0 && first < 0 {
			groups = append(groups, ' ')
		}
		groups = append(groups, 'A'+byte(i))
	}
	l.equal("transactions of those that succeeded", string(groups), transactions)
	l.want(sum)
}

func testCombined(f *fixture) {
	var seen [3]int
	hook := func(i int) func(ctx context.Context, tx pgx.Tx, run int) error {
		return func(ctx context.Context, tx pgx.Tx, _ int) error {
			txretry.AfterCommit(tx, func() { seen[i]++ })
			return f.Add(ctx, tx, worth(i))
		}
	}
	f.line(caller{fn: hook(0)}, caller{fn: hook(1)}, caller{fn: hook(2)}).ended("ABC", "ABC")
	f.equal("AfterCommit functions run", seen, [3]int{1, 1, 1})
}

func testCombinedLimit(f *fixture) {
	two := shared
	two.Combine = 2
	f.line(caller{opts: &two}, caller{opts: &two}, caller{opts: &two}).ended("ABC", "AB C")
}

func testCombinedApart(f *fixture) {
	for name, change := range map[string]func(o *txretry.Options){
		"isolation":      func(o *txretry.Options) { o.Isolation = pgx.RepeatableRead },
		"lock timeout":   func(o *txretry.Options) { o.LockTimeout = 5 * time.Second },
		"commit timeout": func(o *txretry.Options) { o.CommitTimeout = 50 * time.Second },
		"no Combine":     func(o *txretry.Options) { o.Combine = 0 },
	} {
		other := shared
		change(&other)
		nothing := func(context.Context, pgx.Tx, int) error { return nil }
		l := f.line(caller{fn: nothing}, caller{fn: nothing, opts: &other}, caller{fn: nothing})
		f.equal(name+": runs", l.runs, "ABC")
		f.ok(errors.Join(l.errs...))
		if l.in[0] == l.in[1] || l.in[1] == l.in[2] {
			f.Errorf("%s: calls that differ share a transaction", name)
		}
	}
}

// A Witness speaks for its own call only: where fn had found its row in place, it says nothing of the
// transaction.
func testCombinedWitness(f *fixture) {
	opts := shared
	opts.Witness = func(context.Context, pgx.Tx) (bool, error) { return true, nil }
	f.line(caller{opts: &opts}, caller{opts: &opts}).ended("AB", "A B")
}

// A call that comes when the transaction has begun does not join: it might not see what committed before
// it came.
func testCombinedLater(f *fixture) {
	m := f.New(quick())
	var first, later driver.Session
	var all sync.WaitGroup
	f.ok(m.DoWith(f.Context(), shared, func(ctx context.Context, tx pgx.Tx) error {
		first = sessionOf(tx)
		waited := &waited{Context: f.Context(), began: make(chan struct{})}
		all.Go(func() {
			err := m.DoWith(waited, shared, func(ctx context.Context, tx pgx.Tx) error {
				later = sessionOf(tx)
				return f.Add(ctx, tx, 2)
			})
			if err != nil {
				f.Errorf("the later call: %v", err)
			}
		})
		<-waited.began
		return f.Add(ctx, tx, 1)
	}))
	all.Wait()
	if first == later {
		f.Error("a call shares a transaction that began before it")
	}
	f.want(3)
}

// A part that fails ends the transaction. Those before it share the next one, and it fails alone.
func testCombinedFailure(f *fixture) {
	l := f.line(caller{}, caller{}, caller{fn: func(ctx context.Context, tx pgx.Tx, _ int) error {
		txretry.AfterCommit(tx, func() { f.Error("a call that failed has committed") })
		f.add(ctx, tx, worth(2))
		return errBusiness
	}}, caller{})
	l.ended("ABCABCD", "AB D")
	f.is(l.errs[2], errBusiness)
}

// A panic and an exit come out of Do at once, as a goroutine that has ended cannot run its fn again.
func testCombinedNoReturn(leave func(), want string) func(f *fixture) {
	return func(f *fixture) {
		var left pgx.Tx
		l := f.line(caller{}, caller{fn: func(ctx context.Context, tx pgx.Tx, _ int) error {
			left = tx
			f.add(ctx, tx, worth(1))
			leave()
			return nil
		}}, caller{})
		f.is(f.Add(f.Context(), left, 1), pgx.ErrTxClosed)
		l.ended("ABAC", "A C")
		f.equal("end of the call", l.errs[1].Error(), want)
	}
}

func boom() { panic("boom") }

// COMMIT fails for one of three followers and does not tell for which: half of them come back.
func testCombinedCommitRefused(sqlstate string) func(f *fixture) {
	return func(f *fixture) {
		l := f.line(caller{}, caller{}, caller{}, caller{fn: func(ctx context.Context, tx pgx.Tx, _ int) error {
			f.add(ctx, tx, worth(3))
			return f.FailAtCommit(ctx, tx, sqlstate)
		}})
		l.ended("ABCDABCDCD", "AB C")
		f.sqlstate(l.errs[3], sqlstate)
	}
}

func testCombinedCommitConflict(f *fixture) {
	l := f.line(caller{}, caller{fn: func(ctx context.Context, tx pgx.Tx, run int) error {
		f.add(ctx, tx, worth(1))
		if run == 1 {
			return f.FailAtCommit(ctx, tx, "40001")
		}
		return nil
	}}, caller{})
	l.ended("ABCABC", "AB C")
}

func testCombinedCancelledInLine(f *fixture) {
	ctx, cancel := context.WithCancel(f.Context())
	l := f.line(caller{fn: func(ctx context.Context, tx pgx.Tx, _ int) error {
		cancel()
		return f.Add(ctx, tx, worth(0))
	}}, caller{ctx: ctx}, caller{})
	f.is(l.errs[1], context.Canceled)
	l.ended("AC", "AC")
}
