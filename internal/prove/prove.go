// Package prove runs a piece of work of a user on a real database, once for each place at which it can
// be interrupted, and compares what it leaves there with what an undisturbed run leaves. The Prove
// functions of the fakes' packages are made of it.
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
	// maxSteps bounds how many schedules there are: five for each statement.
	maxSteps = 100
	// patience is how long one schedule may take. The lease of a gate is in it, if work has one.
	patience = time.Minute
)

// TB is what Run needs of a *testing.T.
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

// Work is what is proven.
type Work struct {
	Name string // of the function that was called, such as inboxtest.Prove
	Code string // what the user calls the code, such as "the handler"

	// Start makes a process on a pool. The function that it returns does the work once, and may be
	// called from several goroutines.
	Start func(ctx context.Context, pool *pgxpool.Pool) (do func(ctx context.Context) Outcome, err error)

	// Fresh has the work done under a new key from now on, and returns it. It is called before a process of a
	// schedule starts. Optional.
	Fresh func() uuid.UUID

	// Keyed work may be done again when it is done already: it has no second effect.
	Keyed bool
	// Sweeps says that work which succeeded may have left something to do to another one.
	Sweeps bool
}

// Outcome is what became of doing the work once.
type Outcome struct {
	Answer  string // what the caller got, if the work has answers
	Err     error  // why it has to be done again; nil: it is done
	GivenUp bool   // nobody will do it again, in spite of Err
}

// runner is one call of Run.
type runner struct {
	Proof
	work Work
	ctx  context.Context // of the present schedule

	key       uuid.UUID // of the present schedule, if the work has one of ours
	before    rows      // what Reset leaves
	clean     rows      // what an undisturbed run leaves after it
	effects   int       // of an undisturbed run
	steps     []pgfault.Step
	schedules int // how many there were
}

// Run reports the first schedule after which something differs, and how to mend it.
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

// all runs every schedule until one fails.
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

// disturbed are the schedules with a fault at one of the steps.
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

// brief names what a step does, in a line.
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

// A schedule is one story of what happens to the work. Each begins with Reset and ends with the rows of
// an undisturbed run.

// reset brings the database to the state in which the work is to be done.
//
// Where Effects counts what the work does elsewhere, each schedule has a key of its own: the other side rightly does
// nothing for one that it knows.
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

// undisturbed shows what is to be compared with, and counts the statements.
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
		return errors.Join(fmt.Errorf(title+"%w%s", last.Err, mendError(last.Err)), p.close())
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
		return errors.New(title + "no row of Proof.Rows has changed, so there is nothing to compare" + mendUnchanged)
	case len(r.steps) > maxSteps:
		return fmt.Errorf(title+"%d statements, more than %d: prove it with smaller data", len(r.steps), maxSteps)
	}
	return nil
}

// undisturbedAgain finds what depends on the attempt.
func (r *runner) undisturbedAgain() error {
	const title = "nothing fails, once more after Reset"
	return r.one(title, pgfault.None, 0, func(s *schedule) error {
		now, err := r.read()
		if err == nil && !now.equal(r.clean) {
			return s.wrong(now, mendChanging(now.changing(r.clean)))
		}
		return err
	})
}

// doneTwice is a delivery after the work is done.
func (r *runner) doneTwice() error {
	return r.one("done, and asked for again", pgfault.None, 0, func(s *schedule) error {
		s.first.run(s.ctx)
		if err := s.settled(s.first); err != nil {
			return err
		}
		return s.compare(mendRepeated)
	})
}

// failed is a fault that the process survives, and which its retries get over.
func (r *runner) failed(fault pgfault.Fault, at place) error {
	return r.one(titles[fault]+at.String(), fault, at.n, func(s *schedule) error {
		err := s.first.firstError()
		if fault == pgfault.Refuse && errors.Is(err, pgx.ErrTxCommitRollback) {
			return fmt.Errorf("%s: %w%s", s.title, err, mendSwallowed)
		}
		return s.compare(mendFailed(fault))
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

// one is a schedule of one process that does the work until it is done.
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

// killed stops the process at a place. Another one does the work, then the first one comes back as a
// process does that was only stopped, its connections gone.
func (r *runner) killed(fault pgfault.Fault, at place) error {
	s, err := r.begin(titles[fault]+at.String(), fault, at.n)
	if err != nil {
		return err
	}
	return s.end(func() error {
		if !s.strikes() { // what runs beside the work does not always come at the same time
			return cmp.Or(s.settled(s.first), s.compare(mendRepeated))
		}
		now, err := r.read()
		if err != nil {
			return err
		}
		if !now.equal(r.before) && !now.equal(r.clean) {
			return s.torn(now, r.mendKilled(fault, at))
		}
		if r.work.Keyed || now.equal(r.before) {
			s.title += ", then done by another process"
			if err := s.other(); err != nil {
				return err
			}
		}
		if err := s.compare(r.mendKilled(fault, at)); err != nil || !r.work.Keyed {
			return err
		}
		s.first.line.Release()
		if err := s.await(); err != nil {
			return err
		}
		s.title += ", then the first one came back"
		return s.compare(r.mendZombie())
	}())
}

// twiceAtOnce has a second process do the work while the first one is in the middle of it.
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
		return s.compare(r.mendTwice())
	}())
}
