package prove

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/internal/pgfault"
)

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
