package prove

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgfault"
)

const (
	// firstPause and longestPause are the time between two attempts at the work.
	firstPause   = 5 * time.Millisecond
	longestPause = 200 * time.Millisecond
	// longestWait is that between two sweeps that have something left to do.
	longestWait = 2 * time.Second
	// farewell is how long a process may take to give its connections back.
	farewell = 10 * time.Second
	// overlap is how long the second of two processes runs at most while the first one is held.
	overlap = 2 * time.Second
)

// process is one that does the work, on connections of its own.
type process struct {
	r    *runner
	line *pgfault.Line
	pool *pgxpool.Pool
	do   func(ctx context.Context) Outcome

	mu      sync.Mutex
	answers []string // that its callers got
	first   error    // of its first attempt
	last    Outcome
}

// start makes a process with a fault.
func (r *runner) start(fault pgfault.Fault, at int) (*process, error) {
	p := &process{r: r, line: pgfault.New(fault, at)}
	cfg := r.Pool.Config()
	cfg.MinConns, cfg.MinIdleConns = 0, 0 // none that nobody asked for
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

// run does the work until it is done, the first time with the fault.
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

// errUnkeyed ends the attempts at work that has had its effect, although it failed: without a key
// nobody could do it again.
var errUnkeyed = errors.New("it is done")

// attempt does the work once. A panic, or the end of the goroutine, is a failure.
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

// outcome returns the last error, and what the callers were told.
func (p *process) outcome() (last Outcome, answers []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.last, p.answers
}

// firstError is that of the attempt with the fault.
func (p *process) firstError() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.first
}

// close ends the process. A connection that is not given back is an error.
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
		return fmt.Errorf("%d connections were not given back to the pool: end every transaction and Release every connection that the code takes", p.pool.Stat().AcquiredConns())
	}
}
