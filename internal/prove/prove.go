package prove

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
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
