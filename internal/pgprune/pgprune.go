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
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
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
	p.cfg.Logger.WarnContext(ctx, p.cfg.Core+"pgx: pruning failed",
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

const (
	// maxRows is how many rows one step deletes: enough for tens of thousands a second, few enough
	// that a step takes some milliseconds.
	maxRows = 1000
	// fewRows is how many a step deletes when maxRows have taken too long.
	fewRows = 100
	// stepTimeout bounds one step.
	stepTimeout = 5 * time.Second
)

const (
	// beginSQL works whatever the database's default: in a stricter transaction a row that another
	// process has just changed is an error.
	beginSQL = `BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE`
	// boundSQL makes the server end a step whose connection fell silent, and with it the lock.
	boundSQL = `SELECT set_config('idle_in_transaction_session_timeout', $1, true), set_config('statement_timeout', $1, true)`
	lockSQL  = `SELECT pg_try_advisory_xact_lock(hashtextextended('holdfast prune ' || $1::text::regclass::oid, 0))`
)

// step is one statement of a pass, repeated until it chooses fewer rows than its limit.
type step struct {
	pool      *pgxpool.Pool
	table     string
	statement Statement
	limit     int
	most      int // the limit while all goes well
	skip      int // rows at the beginning that cannot be deleted
	refused   int // those of this pass
	why       error
	done      bool
}

// do runs the statement once and returns how many rows it deleted. Its error is errTaken where
// another process has the lock. Where the server refuses the rows, the next call tries fewer; one row that is refused alone is
// left out from then on.
func (s *step) do(ctx context.Context) (int, error) {
	chosen, gone, err := s.transaction(ctx)
	if tookTooLong(err) && s.limit > fewRows {
		s.limit, s.most = fewRows, fewRows
		chosen, gone, err = s.transaction(ctx)
	}
	switch {
	case sqlstate.Refused(err) && s.limit > 1:
		s.limit /= 10
		return 0, nil
	case sqlstate.Refused(err):
		return 0, s.leave(ctx, 1, err)
	case err != nil:
		return 0, err
	case gone < chosen:
		if err := s.leave(ctx, chosen-gone, pgcall.Ignored(s.statement.Table, "the DELETE")); err != nil {
			return gone, err
		}
	}
	s.done = chosen < s.limit
	s.limit = min(s.limit*10, s.most)
	return gone, nil
}

// leave leaves out the next n rows, and notes why for the first one. It returns why if there is no such row: then no row is at
// fault.
func (s *step) leave(ctx context.Context, n int, why error) error {
	if s.why == nil {
		id, err := s.name(ctx)
		if err != nil {
			return why
		}
		s.why = fmt.Errorf("row %s of table %s cannot be deleted: %w", id, s.statement.Table, why)
	}
	s.skip += n
	s.refused += n
	return nil
}

// name returns the ID of the next row.
func (s *step) name(ctx context.Context) (id string, err error) {
	err = pgcall.Within(ctx, s.pool, stepTimeout, func(ctx context.Context, conn *pgxpool.Conn) error {
		return conn.QueryRow(ctx, s.statement.nameSQL(), s.statement.args(s.skip)...).Scan(&id)
	})
	return id, err
}

// err returns why rows could not be deleted.
func (s *step) err() error {
	if s.refused > 1 {
		return fmt.Errorf("%w (and %d more rows)", s.why, s.refused-1)
	}
	return s.why
}

// transaction takes two round trips: DELETE and COMMIT share one, so that no lock on a row outlives
// a connection that falls silent.
func (s *step) transaction(ctx context.Context) (chosen, gone int, err error) {
	err = pgcall.Within(ctx, s.pool, stepTimeout, func(ctx context.Context, conn *pgxpool.Conn) error {
		locked, err := s.lock(ctx, conn)
		if err != nil {
			return err
		}
		if !locked {
			return errors.Join(errTaken, rollback(ctx, conn))
		}
		chosen, gone, err = s.delete(ctx, conn)
		return err
	})
	return chosen, gone, err
}

func (s *step) lock(ctx context.Context, conn *pgxpool.Conn) (locked bool, err error) {
	queue := &pgx.Batch{}
	queue.Queue(beginSQL)
	queue.Queue(boundSQL, stepTimeout.String())
	queue.Queue(lockSQL, s.table).QueryRow(func(row pgx.Row) error { return row.Scan(&locked) })
	if err := conn.SendBatch(ctx, queue).Close(); err != nil {
		return false, errors.Join(err, rollback(ctx, conn))
	}
	return locked, nil
}

func (s *step) delete(ctx context.Context, conn *pgxpool.Conn) (chosen, gone int, err error) {
	queue := &pgx.Batch{}
	queue.Queue(s.statement.DeleteSQL(), s.statement.args(s.limit, s.skip)...).QueryRow(func(row pgx.Row) error { return row.Scan(&chosen, &gone) })
	queue.Queue(`COMMIT`)
	if err := conn.SendBatch(ctx, queue).Close(); err != nil {
		return 0, 0, errors.Join(err, rollback(ctx, conn))
	}
	return chosen, gone, nil
}

// rollback does nothing where the connection was closed: the server ends the transaction then.
func rollback(ctx context.Context, conn *pgxpool.Conn) error {
	if conn.Conn().IsClosed() {
		return nil
	}
	_, err := conn.Exec(ctx, `ROLLBACK`)
	return err
}

// tookTooLong says whether the step met its bound, on the way or at the server.
func tookTooLong(err error) bool {
	const queryCanceled = "57014"
	answer, ok := errors.AsType[*pgconn.PgError](err)
	return errors.Is(err, pgcall.ErrSilent) || ok && answer.Code == queryCanceled
}

// Statement says which rows of a table are due.
type Statement struct {
	// Table is qualified and quoted.
	Table string
	// ID is a column that tells rows apart: a key, or ctid, which does so in one partition only.
	ID string
	// Also is a condition, met by all that is due, of rows whose ID is that of a row that is due. ctid needs it, since a
	// table may be partitioned. "" means none.
	Also string
	// Due is a condition, by an index, and the order in which that has the rows: what follows WHERE.
	Due string
	// Args are the parameters of Due.
	Args []any
}

// DeleteSQL deletes rows and skips those that are locked. It returns how many it has chosen, and how many it has deleted:
// fewer, where a trigger or a policy of the table drops the change. The parameters after Args are the limit, and how many rows
// to leave out at the beginning.
func (s Statement) DeleteSQL() string {
	also := ""
	if s.Also != "" {
		also = " AND (" + s.Also + ") IS TRUE" // no index serves that, so the rows are looked up by their ID
	}
	return fmt.Sprintf(`WITH due AS MATERIALIZED (SELECT %[2]s AS id FROM %[1]s WHERE %[3]s LIMIT $%[4]d OFFSET $%[5]d FOR UPDATE SKIP LOCKED),
gone AS (DELETE FROM %[1]s WHERE %[2]s = ANY(ARRAY(SELECT id FROM due))`, s.Table, s.ID, s.Due, len(s.Args)+1, len(s.Args)+2) + also + ` RETURNING 1)
SELECT (SELECT count(*) FROM due), (SELECT count(*) FROM gone)`
}

// nameSQL returns the ID of a row, for people. Behind Args comes how many rows are before it.
func (s Statement) nameSQL() string {
	return fmt.Sprintf(`SELECT %s::text FROM %s WHERE %s LIMIT 1 OFFSET $%d`, s.ID, s.Table, s.Due, len(s.Args)+1)
}

// countSQL counts them, locked or not. Behind Args comes the limit.
func (s Statement) countSQL() string {
	return fmt.Sprintf(`SELECT count(*) FROM (SELECT FROM %s WHERE %s LIMIT $%d) due`, s.Table, s.Due, len(s.Args)+1)
}

func (s Statement) args(more ...any) []any { return append(slices.Clone(s.Args), more...) }

// MaxCount bounds what Count counts of each statement.
const MaxCount = 100_000

// Count returns how many rows Prune would delete by now; no statement counts above MaxCount.
func (p *Pruner) Count(ctx context.Context) (total int, err error) {
	for _, s := range p.cfg.Statements {
		var n int
		err := pgcall.Within(ctx, p.cfg.Pool, stepTimeout, func(ctx context.Context, conn *pgxpool.Conn) error {
			return conn.QueryRow(ctx, s.countSQL(), s.args(MaxCount)...).Scan(&n)
		})
		if err != nil {
			return total, fmt.Errorf("%spgx: count what is due: %w", p.cfg.Core, p.cfg.Explain(err))
		}
		total += n
	}
	return total, nil
}
