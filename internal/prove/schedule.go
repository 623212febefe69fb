package prove

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgfault"
)

// begin resets the database and starts a process.
func (r *runner) begin(title string, fault pgfault.Fault, at int) (*schedule, error) {
	before, err := r.reset()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", title, err)
	}
	first, err := r.start(fault, at)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", title, err)
	}
	ended := make(chan struct{})
	close(ended)
	ctx, cancel := context.WithCancel(r.ctx)
	return &schedule{r: r, title: title, ctx: ctx, cancel: cancel, first: first, all: []*process{first}, effects: before, ended: ended}, nil
}

// schedule is a running schedule.
type schedule struct {
	r       *runner
	title   string
	ctx     context.Context
	cancel  context.CancelFunc
	first   *process   // the process with the fault
	all     []*process // first, and the later ones
	effects int        // at the start
	ended   chan struct{}
}

// strikes runs the work of the first process in another goroutine. It reports whether the fault struck
// before the work was done.
func (s *schedule) strikes() bool {
	ended := make(chan struct{})
	s.ended = ended
	go func() {
		defer close(ended)
		s.first.run(s.ctx)
	}()
	select {
	case <-s.first.line.Struck():
		return true
	case <-ended:
		return false
	}
}

// await waits until the first process has finished.
func (s *schedule) await() error {
	select {
	case <-s.ended:
		return s.settled(s.first)
	case <-s.ctx.Done():
		return fmt.Errorf("%s: it did not end within %v", s.title, patience)
	}
}

// other runs the work in another process.
func (s *schedule) other() error {
	p, err := s.r.start(pgfault.None, 0)
	if err != nil {
		return fmt.Errorf("%s: %w", s.title, err)
	}
	s.all = append(s.all, p)
	p.run(s.ctx)
	return s.settled(p)
}

// beside runs the work in another process while the first one is held. Then the first one continues.
func (s *schedule) beside() error {
	p, err := s.r.start(pgfault.None, 0)
	if err != nil {
		return fmt.Errorf("%s: %w", s.title, err)
	}
	s.all = append(s.all, p)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		p.run(s.ctx)
	}()
	s.untilStuck(p, ended)
	s.first.line.Release()
	<-ended
	return s.settled(p)
}

// untilStuck waits until a process has finished, has failed for the first time or waits for a lock.
func (s *schedule) untilStuck(p *process, ended <-chan struct{}) {
	enough := time.After(overlap)
	for p.firstError() == nil && !s.r.waiting(p.line.Backends()) {
		select {
		case <-ended:
			return
		case <-enough:
			return
		case <-time.After(firstPause):
		}
	}
}

// waiting reports whether one of these backends waits for a lock. An error counts as no.
func (r *runner) waiting(pids []uint32) bool {
	for _, pid := range pids {
		var blocked bool
		err := r.Pool.QueryRow(r.ctx, "SELECT cardinality(pg_blocking_pids($1)) > 0", pgx.QueryExecModeSimpleProtocol, int32(pid)).Scan(&blocked)
		if err == nil && blocked {
			return true
		}
	}
	return false
}

// settled returns an error if a process did not get the work done.
func (s *schedule) settled(p *process) error {
	last, _ := p.outcome()
	switch {
	case last.Err == nil, errors.Is(last.Err, errUnkeyed):
		return nil
	case last.GivenUp:
		return fmt.Errorf("%s: it was given up for good: %w%s", s.title, last.Err, fixGivenUp)
	}
	return fmt.Errorf("%s: it is not done within %v: %w", s.title, patience, last.Err)
}

// end closes the processes.
func (s *schedule) end(err error) error {
	s.cancel()
	s.first.line.Release()
	<-s.ended
	for _, p := range s.all {
		if left := p.close(); err == nil && left != nil {
			err = fmt.Errorf("%s: %w", s.title, left)
		}
	}
	return err
}

// compare checks that everything is as after an undisturbed run.
func (s *schedule) compare(fix string) error {
	now, err := s.r.readSettled()
	if err != nil {
		return err
	}
	if !now.equal(s.r.clean) {
		return s.wrong(now, fix)
	}
	if did := s.r.count() - s.effects; did != s.r.effects {
		return fmt.Errorf("%s: Proof.Effects counts %d, %d after an undisturbed run%s", s.title, did, s.r.effects, fixEffects(did > s.r.effects))
	}
	return s.sameAnswers()
}

// readSettled gives later sweeps some time to finish the remaining work, and reads the rows.
func (r *runner) readSettled() (rows, error) {
	now, err := r.read()
	for pause := firstPause; err == nil && r.work.Sweeps && !now.equal(r.clean) && pause <= longestWait; pause *= 2 {
		p, failed := r.start(pgfault.None, 0)
		if failed != nil {
			return nil, failed
		}
		time.Sleep(pause)
		p.run(r.ctx)
		if failed := p.close(); failed != nil {
			return nil, failed
		}
		now, err = r.read()
	}
	return now, err
}

func (s *schedule) sameAnswers() error {
	var all []string
	for _, p := range s.all {
		_, answers := p.outcome()
		all = append(all, answers...)
	}
	for _, answer := range all {
		if answer != all[0] {
			return fmt.Errorf("%s: two callers got different answers\n      - %s\n      + %s%s", s.title, all[0], answer, fixAnswers)
		}
	}
	return nil
}

// wrong describes how rows differ from the rows of an undisturbed run.
func (s *schedule) wrong(now rows, fix string) error {
	return fmt.Errorf("%s: the rows differ from those of an undisturbed run (+ too many, - missing):%s%s", s.title, now.differences(s.r.clean), fix)
}

// torn describes a partial effect.
func (s *schedule) torn(now rows, fix string) error {
	return fmt.Errorf("%s: before the work is repeated, a part of its effect is there (+ against the rows before):%s%s", s.title, now.differences(s.r.before), fix)
}

const (
	// firstPause and longestPause bound the time between two attempts.
	firstPause   = 5 * time.Millisecond
	longestPause = 200 * time.Millisecond
	// longestWait bounds the time between two sweeps that have something left to do.
	longestWait = 2 * time.Second
	// farewell is how long a process may take to return its connections.
	farewell = 10 * time.Second
	// overlap is how long the second of two processes may run while the first one is held.
	overlap = 2 * time.Second
)

// process does the work on its own connections.
type process struct {
	r    *runner
	line *pgfault.Line
	pool *pgxpool.Pool
	do   func(ctx context.Context) Outcome

	mu      sync.Mutex
	answers []string // to its callers
	first   error    // of its first attempt
	last    Outcome
}

// start makes a process with a fault.
func (r *runner) start(fault pgfault.Fault, at int) (*process, error) {
	p := &process{r: r, line: pgfault.New(fault, at)}
	cfg := r.Pool.Config()
	cfg.MinConns, cfg.MinIdleConns = 0, 0 // no idle connections in the background
	p.line.Attach(&cfg.ConnConfig.Config)
	var err error
	if p.pool, err = pgxpool.NewWithConfig(r.ctx, cfg); err != nil {
		return nil, err
	}
	p.do, err = r.work.Start(r.ctx, p.pool)
	if err != nil {
		p.pool.Close()
		return nil, fmt.Errorf("start: %w", err)
	}
	return p, nil
}

// run repeats the work until it is done. The first attempt has the fault.
func (p *process) run(ctx context.Context) {
	p.line.Arm()
	p.attempt(ctx)
	p.line.Disarm()
	for pause := firstPause; p.again() && ctx.Err() == nil; pause = min(2*pause, longestPause) {
		select {
		case <-time.After(pause):
			p.attempt(ctx)
		case <-ctx.Done():
		}
	}
}

func (p *process) again() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.last.Err != nil && !p.last.GivenUp && !errors.Is(p.last.Err, errUnkeyed)
}

// errUnkeyed ends the attempts of work that failed after it took effect: without a key nobody could
// repeat it.
var errUnkeyed = errors.New("it is done")

// attempt does the work once. A panic or runtime.Goexit counts as a failure.
func (p *process) attempt(ctx context.Context) {
	out := Outcome{Err: errors.New("the goroutine was exited")}
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() {
			if v := recover(); v != nil {
				out.Err = fmt.Errorf("panic: %v\n%s", v, debug.Stack())
			}
		}()
		out = p.do(ctx)
	}()
	<-done
	if out.Err != nil && !p.r.work.Keyed {
		if now, err := p.r.read(); err == nil && now.equal(p.r.clean) {
			out.Err = fmt.Errorf("%w: %w", errUnkeyed, out.Err)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.first == nil {
		p.first = out.Err
	}
	p.last = out
	if out.Err == nil {
		p.answers = append(p.answers, out.Answer)
	}
}

// outcome returns the last outcome, and the answers to the callers.
func (p *process) outcome() (last Outcome, answers []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.last, p.answers
}

// firstError returns the error of the attempt with the fault.
func (p *process) firstError() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.first
}

// close ends the process. A connection that was not returned to the pool is an error.
func (p *process) close() error {
	p.line.Release()
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		p.pool.Close()
	}()
	select {
	case <-closed:
		return nil
	case <-time.After(farewell):
		return fmt.Errorf("%d connections were not returned to the pool: end every transaction and Release every connection that the code takes", p.pool.Stat().AcquiredConns())
	}
}
