// Package pgprune deletes what is due of a table in small steps, beside the work for which the
// table is there.
//
// A step is one transaction at READ COMMITTED. It tries an advisory lock on the table first, so that
// any number of processes share the work without a leader, behind poolers too. Then it deletes at
// most 1,000 rows. It has 5 s; one that needs longer is repeated with 100 rows. After a full step
// comes a pause as long as the step took, so pruning takes half a connection at most. A step that is
// not full ends the statement.
//
// A row that the server refuses to delete, or whose DELETE a trigger drops, is left out and reported, and the others are
// deleted: a step that is refused is repeated with a tenth of its rows. A statement that fails for another reason does not
// keep the others from being run.
package pgprune

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"go.opentelemetry.io/otel/metric"

	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/sqlstate"
	"github.com/holdfast-go/holdfast/internal/telemetry"
)

const (
	// DefaultInterval is the time between two passes where Config.Interval is 0.
	DefaultInterval = time.Minute
	// passTimeout bounds a pass that Written starts: nobody waits for its end.
	passTimeout = 5 * time.Second
	// refusing is for how long a pass goes on with a statement that leaves rows out. The next pass goes on where it ended.
	refusing = 10 * time.Second
	// takenPause is how long Prune leaves a table alone that another process prunes.
	takenPause = 50 * time.Millisecond
)

// Config tunes a Pruner. Pool, Table, Core and Statements are required.
type Config struct {
	Pool  *pgxpool.Pool
	Table string // qualified and quoted; the lock belongs to it
	Core  string // such as "outbox": names the counter, and with pgx behind it log lines and errors
	// Statements say what is deleted, one after the other.
	Statements []Statement
	// Interval is the time between two passes. 0: 1 minute. Negative: no passes, Prune alone works.
	Interval time.Duration
	// Explain words errors of the server. Optional.
	Explain       func(error) error
	Logger        *slog.Logger         // nil: slog.Default()
	MeterProvider metric.MeterProvider // nil: the global one
}

// Pruner prunes one table. It is safe for concurrent use.
type Pruner struct {
	cfg    Config
	pruned metric.Int64Counter

	mu     sync.Mutex
	resume []int // for each statement, how many rows at its beginning the next pass leaves out

	next    atomic.Int64 // when Written starts the next pass, in Unix nanoseconds
	running atomic.Bool  // a pass of Written
}

// New returns a Pruner. The first pass is due after a random part of the interval, so that
// processes that start together do not prune together.
func New(cfg Config) (*Pruner, error) {
	if cfg.Interval == 0 {
		cfg.Interval = DefaultInterval
	}
	if cfg.Explain == nil {
		cfg.Explain = func(err error) error { return err }
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	kit := telemetry.New("github.com/holdfast-go/holdfast/"+cfg.Core, nil, cfg.MeterProvider)
	pruned, err := kit.Meter.Int64Counter("holdfast."+cfg.Core+".pruned",
		metric.WithDescription("Rows that were deleted because they were due."), metric.WithUnit("{row}"))
	if err != nil {
		return nil, fmt.Errorf("%spgx: %w", cfg.Core, err)
	}
	p := &Pruner{cfg: cfg, pruned: pruned, resume: make([]int, len(cfg.Statements))}
	p.next.Store(time.Now().Add(p.first()).UnixNano())
	return p, nil
}

func (p *Pruner) off() bool { return p.cfg.Interval < 0 }

func (p *Pruner) first() time.Duration {
	return time.Duration(rand.Float64() * float64(p.cfg.Interval))
}

// Run does a pass per interval until ctx ends. Where passes are off it returns at once.
func (p *Pruner) Run(ctx context.Context) {
	if p.off() {
		return
	}
	for pause := p.first(); runloop.Sleep(ctx, pause) == nil; pause = p.cfg.Interval {
		p.Pass(ctx)
	}
}

// Written says that rows were written. If a pass is due, it starts one in the background, of 5 s at
// most: for stores that no service runs beside. It costs no statement and does not block.
func (p *Pruner) Written() {
	if p.off() || time.Now().UnixNano() < p.next.Load() || !p.running.CompareAndSwap(false, true) {
		return
	}
	go func() {
		defer p.running.Store(false)
		ctx, cancel := context.WithTimeout(context.Background(), passTimeout)
		defer cancel()
		p.Pass(ctx)
		p.next.Store(time.Now().Add(p.cfg.Interval).UnixNano())
	}()
}

// Pass does one pass, until nothing is due, another process prunes the table, or ctx ends. A failure
// is one line in the log. Where passes are off it does nothing.
func (p *Pruner) Pass(ctx context.Context) {
	if p.off() {
		return
	}
	_, err := p.prune(ctx, true)
	if err == nil || errors.Is(err, errTaken) || ctx.Err() != nil {
		return
	}
	p.cfg.Logger.WarnContext(ctx, p.cfg.Core+"pgx: pruning failed, the next pass tries again",
		slog.String("table", p.cfg.Table), slog.Any("error", p.cfg.Explain(err)))
}

// Prune deletes everything that is due and returns how many rows that was, also with an error: rows that cannot be deleted,
// of which the error names one, do not keep the others. Where another process prunes the table, it takes turns with it.
func (p *Pruner) Prune(ctx context.Context) (int, error) {
	n, err := p.prune(ctx, false)
	if err != nil {
		return n, fmt.Errorf("%spgx: prune: %w", p.cfg.Core, p.cfg.Explain(err))
	}
	return n, nil
}

var errTaken = errors.New("another process prunes the table")

// prune runs the statements to their ends. A pass ends early where another process has the lock, or where it leaves out rows
// for long.
func (p *Pruner) prune(ctx context.Context, pass bool) (total int, err error) {
	var errs []error
	for i := range p.cfg.Statements {
		n, err := p.run(ctx, i, pass)
		total += n
		if err != nil {
			errs = append(errs, err)
		}
		if err != nil && sqlstate.Of(err) == "" && !errors.Is(err, pgcall.ErrIgnored) { // the others would fail as well
			break
		}
	}
	return total, errors.Join(errs...)
}

// run runs a statement to its end.
func (p *Pruner) run(ctx context.Context, i int, pass bool) (total int, err error) {
	s := step{pool: p.cfg.Pool, table: p.cfg.Table, statement: p.cfg.Statements[i], limit: maxRows, most: maxRows}
	if pass {
		s.skip = p.begin(i)
	}
	for start := time.Now(); !s.done; {
		began := time.Now()
		n, err := s.do(ctx)
		total += n
		p.pruned.Add(ctx, int64(n))
		switch {
		case errors.Is(err, errTaken) && !pass:
			err = runloop.Sleep(ctx, takenPause)
		case err == nil && pass && s.refused > 0 && time.Since(start) > refusing:
			p.goOn(i, s.skip)
			return total, s.err()
		case err == nil && !s.done:
			err = runloop.Sleep(ctx, time.Since(began))
		}
		if err != nil {
			return total, errors.Join(err, s.err())
		}
	}
	return total, s.err()
}

// begin returns how many rows a pass leaves out at first. The pass after that one leaves out none.
func (p *Pruner) begin(i int) (skip int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	skip, p.resume[i] = p.resume[i], 0
	return skip
}

func (p *Pruner) goOn(i, skip int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.resume[i] = skip
}
