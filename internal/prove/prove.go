// Package prove interrupts a user's code at every statement, on a real database. It runs the code once for each
// place and compares the resulting rows with the rows of an undisturbed run. The Prove functions of the fakes'
// packages use it.
package prove

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgfault"
)

const (
	// maxSteps bounds the number of statements, because each adds five schedules.
	maxSteps = 100
	// patience bounds one schedule, including the lease of a gate if the work has one.
	patience = time.Minute
)

// TB is the part of *testing.T that Run needs.
type TB interface {
	Helper()
	Context() context.Context
	Logf(format string, args ...any)
	Errorf(format string, args ...any)
}

// Proof is txretrytest.Proof.
type Proof struct {
	Pool    *pgxpool.Pool
	Reset   string
	Rows    []string
	Effects func() int
}

// Work is the code under test.
type Work struct {
	Name string // of the called function, such as inboxtest.Prove
	Code string // the user's word for the code, such as "the handler"

	// Start makes a process on a pool. The returned function does the work once, and may be called from several
	// goroutines.
	Start func(ctx context.Context, pool *pgxpool.Pool) (do func(ctx context.Context) Outcome, err error)

	// Fresh makes the work use a new key from now on, and returns the key. It is called before a process of a
	// schedule starts. Optional.
	Fresh func() uuid.UUID

	// Keyed work may run again after it is done, without a second effect.
	Keyed bool
	// Sweeps means that a successful run may leave work for another run.
	Sweeps bool
}

// Outcome is the result of one run of the work.
type Outcome struct {
	Answer  string // the response to the caller, if the work has responses
	Err     error  // nil: the work is done; else it must run again
	GivenUp bool   // nobody will retry it, in spite of Err
}

// runner is one call of Run.
type runner struct {
	Proof
	work Work
	ctx  context.Context // of the current schedule

	key       uuid.UUID // of the current schedule, if Fresh is set
	before    rows      // after Reset
	clean     rows      // after Reset and an undisturbed run
	effects   int       // of an undisturbed run
	steps     []pgfault.Step
	schedules int // how many ran
}

// Run reports the first schedule whose result differs, with a fix.
func Run(t TB, p Proof, w Work) {
	t.Helper()
	start := time.Now()
	r := &runner{Proof: p, work: w, ctx: t.Context()}
	err := p.validate()
	if err == nil {
		err = r.all(t.Context())
	}
	if err != nil {
		t.Errorf("%s: %v", w.Name, err)
		return
	}
	t.Logf("%s: %d statements, %d schedules in %v", w.Name, len(r.steps), r.schedules, time.Since(start).Round(time.Millisecond))
}

func (p Proof) validate() error {
	var problems []error
	if p.Pool == nil {
		problems = append(problems, errors.New("Proof.Pool is nil"))
	}
	if strings.TrimSpace(p.Reset) == "" {
		problems = append(problems, errors.New("Proof.Reset is empty"))
	}
	if len(p.Rows) == 0 {
		problems = append(problems, errors.New("Proof.Rows is empty"))
	}
	return errors.Join(problems...)
}

// all runs the schedules one by one and returns the first error.
func (r *runner) all(ctx context.Context) error {
	all := []func() error{r.undisturbed, r.undisturbedAgain}
	if r.work.Keyed {
		all = append(all, r.doneTwice)
	}
	for i := 0; i < len(all); i++ {
		bounded, cancel := context.WithTimeout(ctx, patience)
		r.ctx = bounded
		r.schedules++
		err := all[i]()
		cancel()
		if err != nil {
			return fmt.Errorf("schedule %d, %w", r.schedules, err)
		}
		if i == 0 {
			all = append(all, r.disturbed()...)
		}
	}
	return nil
}

// disturbed returns the schedules with a fault at one of the steps.
func (r *runner) disturbed() (all []func() error) {
	for i, step := range r.steps {
		at := place{r: r, n: i + 1}
		refuse := pgfault.Refuse
		if step.Commit {
			refuse = pgfault.Conflict
		}
		all = append(all,
			func() error { return r.killed(pgfault.KillBefore, at) },
			func() error { return r.killed(pgfault.KillAfter, at) },
			func() error { return r.failed(pgfault.LoseAfter, at) },
			func() error { return r.failed(refuse, at) },
		)
		if r.work.Keyed {
			all = append(all, func() error { return r.twiceAtOnce(at) })
		}
	}
	return all
}

// place is a step of the undisturbed run.
type place struct {
	r *runner
	n int // from 1
}

func (p place) step() pgfault.Step { return p.r.steps[p.n-1] }

func (p place) String() string {
	return fmt.Sprintf("statement %d of %d (%s)", p.n, len(p.r.steps), brief(p.step().SQL))
}

// brief describes the statements of a step in one line.
func brief(sql []string) string {
	var parts []string
	for _, s := range sql {
		s = strings.Join(strings.Fields(s), " ")
		if strings.HasPrefix(strings.ToLower(s), "set local ") && len(sql) > 1 {
			continue
		}
		if runes := []rune(s); len(runes) > maxBrief {
			s = string(runes[:maxBrief]) + "…"
		}
		parts = append(parts, s)
	}
	return strings.Join(parts, "; ")
}

const maxBrief = 70

// A schedule is one sequence of events. Each starts with Reset and ends with the rows of an undisturbed run.

// reset brings the database to the state before the work.
//
// If Effects counts effects elsewhere, each schedule has its own key: the other side would rightly ignore a key that
// it has seen before.
func (r *runner) reset() (effects int, err error) {
	if r.work.Fresh != nil && (r.Effects != nil || r.key == uuid.Nil) {
		r.key = r.work.Fresh()
	}
	if _, err := r.Pool.Exec(r.ctx, r.Reset, pgx.QueryExecModeSimpleProtocol); err != nil {
		return 0, fmt.Errorf("Proof.Reset: %w", err)
	}
	return r.count(), nil
}

func (r *runner) count() int {
	if r.Effects == nil {
		return 0
	}
	return r.Effects()
}

// undisturbed records the rows to compare with, and counts the statements.
func (r *runner) undisturbed() error {
	const title = "nothing fails: "
	before, err := r.reset()
	if err != nil {
		return fmt.Errorf(title+"%w", err)
	}
	if r.before, err = r.read(); err != nil {
		return fmt.Errorf(title+"%w", err)
	}
	p, err := r.start(pgfault.None, 0)
	if err != nil {
		return fmt.Errorf(title+"%w", err)
	}
	p.line.Arm()
	p.attempt(r.ctx)
	r.steps = p.line.Disarm()
	if last, _ := p.outcome(); last.Err != nil {
		return errors.Join(fmt.Errorf(title+"%w%s", last.Err, fixError(last.Err)), p.close())
	}
	if err := p.close(); err != nil {
		return fmt.Errorf(title+"%w", err)
	}
	r.effects = r.count() - before
	if r.clean, err = r.read(); err != nil {
		return fmt.Errorf(title+"%w", err)
	}
	switch {
	case r.clean.equal(r.before):
		return errors.New(title + "no row of Proof.Rows has changed, so there is nothing to compare" + fixUnchanged)
	case len(r.steps) > maxSteps:
		return fmt.Errorf(title+"%d statements, more than %d: prove it with smaller data", len(r.steps), maxSteps)
	}
	return nil
}

// undisturbedAgain finds values that depend on the attempt.
func (r *runner) undisturbedAgain() error {
	const title = "nothing fails, once more after Reset"
	return r.one(title, pgfault.None, 0, func(s *schedule) error {
		now, err := r.read()
		if err == nil && !now.equal(r.clean) {
			return s.wrong(now, fixChanging(now.changing(r.clean)))
		}
		return err
	})
}

// doneTwice delivers the work again after it is done.
func (r *runner) doneTwice() error {
	return r.one("done, and asked for again", pgfault.None, 0, func(s *schedule) error {
		s.first.run(s.ctx)
		if err := s.settled(s.first); err != nil {
			return err
		}
		return s.compare(fixRepeated)
	})
}

// failed injects a fault that the process survives, and that its retries overcome.
func (r *runner) failed(fault pgfault.Fault, at place) error {
	return r.one(titles[fault]+at.String(), fault, at.n, func(s *schedule) error {
		err := s.first.firstError()
		if fault == pgfault.Refuse && errors.Is(err, pgx.ErrTxCommitRollback) {
			return fmt.Errorf("%s: %w%s", s.title, err, fixSwallowed)
		}
		return s.compare(fixFailed(fault))
	})
}

var titles = map[pgfault.Fault]string{
	pgfault.KillBefore: "killed before ",
	pgfault.KillAfter:  "killed after ",
	pgfault.LoseAfter:  "the connection lost after ",
	pgfault.Refuse:     "refused by the server as too slow: ",
	pgfault.Conflict:   "refused by the server by a conflict: ",
	pgfault.Hold:       "two at once, the first waits before ",
}

// one is a schedule in which one process repeats the work until it is done.
func (r *runner) one(title string, fault pgfault.Fault, at int, then func(s *schedule) error) error {
	s, err := r.begin(title, fault, at)
	if err != nil {
		return err
	}
	return s.end(func() error {
		s.first.run(s.ctx)
		if err := s.settled(s.first); err != nil {
			return err
		}
		return then(s)
	}())
}

// killed stops the process at a place. Another process does the work. Then the first one comes back with its
// connections gone, like a process that was only suspended.
func (r *runner) killed(fault pgfault.Fault, at place) error {
	s, err := r.begin(titles[fault]+at.String(), fault, at.n)
	if err != nil {
		return err
	}
	return s.end(func() error {
		if !s.strikes() { // background statements do not always come at the same time
			return cmp.Or(s.settled(s.first), s.compare(fixRepeated))
		}
		now, err := r.read()
		if err != nil {
			return err
		}
		if !now.equal(r.before) && !now.equal(r.clean) {
			return s.torn(now, r.fixKilled(fault, at))
		}
		if r.work.Keyed || now.equal(r.before) {
			s.title += ", then done by another process"
			if err := s.other(); err != nil {
				return err
			}
		}
		if err := s.compare(r.fixKilled(fault, at)); err != nil || !r.work.Keyed {
			return err
		}
		s.first.line.Release()
		if err := s.await(); err != nil {
			return err
		}
		s.title += ", then the first one came back"
		return s.compare(r.fixZombie())
	}())
}

// twiceAtOnce lets a second process do the work while the first one is in the middle of it.
func (r *runner) twiceAtOnce(at place) error {
	s, err := r.begin(titles[pgfault.Hold]+at.String(), pgfault.Hold, at.n)
	if err != nil {
		return err
	}
	return s.end(func() error {
		if s.strikes() {
			if err := s.beside(); err != nil {
				return err
			}
		}
		if err := s.await(); err != nil {
			return err
		}
		return s.compare(r.fixTwice())
	}())
}
