// Package pgprune deletes the due rows of a table in small steps, beside the work on the table.
//
// A step is one transaction at READ COMMITTED. It tries an advisory lock on the table first, so that any number of
// processes share the work without a leader, also behind poolers. Then it deletes at most 1,000 rows. Its limit is 5
// s; a step that takes longer is repeated with 100 rows. After a full step comes a pause as long as the step, so
// pruning uses half a connection at most. A step that is not full ends the statement.
//
// Some rows cannot be deleted, because the server rejects it or a trigger drops the DELETE. A rejected step is
// repeated with a tenth of its rows until the row is found, which is skipped and reported. If a statement fails for
// another reason, the next statements still run.
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
	// DefaultInterval is used if Config.Interval is 0.
	DefaultInterval = time.Minute
	// passTimeout bounds a pass that Written starts, because nobody waits for it.
	passTimeout = 5 * time.Second
	// refusing bounds a pass with a statement that skips rows. The next pass continues there.
	refusing = 10 * time.Second
	// takenPause is how long Prune waits while another process prunes the table.
	takenPause = 50 * time.Millisecond
)

// Config tunes a Pruner. Pool, Table, Core and Statements are required.
type Config struct {
	Pool  *pgxpool.Pool
	Table string // qualified and quoted; the advisory lock is named after it
	Core  string // such as "outbox": names the counter, and with pgx appended log lines and errors
	// Statements select the rows to delete, one statement after the other.
	Statements []Statement
	// Interval is the time between two passes. 0: 1 minute. Negative: no passes, only Prune works.
	Interval time.Duration
	// Explain rewords errors of the server. Optional.
	Explain       func(error) error
	Logger        *slog.Logger         // nil: slog.Default()
	MeterProvider metric.MeterProvider // nil: the global one
}

// Pruner prunes one table. It is safe for concurrent use.
type Pruner struct {
	cfg    Config
	pruned metric.Int64Counter

	mu     sync.Mutex
	resume []int // for each statement, how many rows at its start the next pass skips

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

// Run does a pass per interval until ctx ends. If passes are off it returns at once.
func (p *Pruner) Run(ctx context.Context) {
	if p.off() {
		return
	}
	for pause := p.first(); runloop.Sleep(ctx, pause) == nil; pause = p.cfg.Interval {
		p.Pass(ctx)
	}
}

// Written reports that rows were written. If a pass is due, it starts one of up to 5 s in the background. It is for
// stores without a running service. It sends no statement itself and does not block.
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

// Pass deletes until nothing is due, another process prunes the table, or ctx ends. It logs a failure. If passes are
// off it does nothing.
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

// Prune deletes all due rows and returns their number, also with an error. It skips rows that cannot be deleted; the
// error names one of them. If another process prunes the table, the two take turns.
func (p *Pruner) Prune(ctx context.Context) (int, error) {
	n, err := p.prune(ctx, false)
	if err != nil {
		return n, fmt.Errorf("%spgx: prune: %w", p.cfg.Core, p.cfg.Explain(err))
	}
	return n, nil
}

var errTaken = errors.New("another process prunes the table")

// prune runs the statements to their ends. A pass ends early if another process has the lock, or if it has skipped
// rows for too long.
func (p *Pruner) prune(ctx context.Context, pass bool) (total int, err error) {
	var errs []error
	for i := range p.cfg.Statements {
		n, err := p.run(ctx, i, pass)
		total += n
		if err != nil {
			errs = append(errs, err)
		}
		if err != nil && sqlstate.Of(err) == "" && !errors.Is(err, pgcall.ErrIgnored) { // the next statements would fail as well
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

// begin returns how many rows a pass skips at its start. The pass after it skips none.
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
	// maxRows is the number of rows one step deletes: enough for tens of thousands a second, and few enough for a
	// step of milliseconds.
	maxRows = 1000
	// fewRows is the number for a step that was too slow with maxRows.
	fewRows = 100
	// stepTimeout bounds one step.
	stepTimeout = 5 * time.Second
)

const (
	// beginSQL sets the isolation level, because in a stricter one a row that another process has just changed is an
	// error.
	beginSQL = `BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE`
	// boundSQL makes the server end a step whose connection fell silent, which frees the lock.
	boundSQL = `SELECT set_config('idle_in_transaction_session_timeout', $1, true), set_config('statement_timeout', $1, true)`
	lockSQL  = `SELECT pg_try_advisory_xact_lock(hashtextextended('holdfast prune ' || $1::text::regclass::oid, 0))`
)

// step is one statement of a pass, repeated until it chooses fewer rows than its limit.
type step struct {
	pool      *pgxpool.Pool
	table     string
	statement Statement
	limit     int
	most      int // the limit without failures
	skip      int // rows at the start that cannot be deleted
	refused   int // rows of this pass that cannot be deleted
	why       error
	done      bool
}

// do runs the statement once and returns the number of deleted rows. Its error is errTaken if another process has the
// lock. If the server rejects the rows, the next call tries fewer; a row that is rejected alone is skipped from then
// on.
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

// leave skips the next n rows and records why for the first one. If there is no such row, it returns why, because
// then no row is at fault.
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

// transaction takes two round trips: DELETE and COMMIT share one, so that no row lock outlives a connection that
// falls silent.
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

// rollback does nothing on a closed connection, because the server ends the transaction then.
func rollback(ctx context.Context, conn *pgxpool.Conn) error {
	if conn.Conn().IsClosed() {
		return nil
	}
	_, err := conn.Exec(ctx, `ROLLBACK`)
	return err
}

// tookTooLong reports whether the step reached its limit, in the client or in the server.
func tookTooLong(err error) bool {
	const queryCanceled = "57014"
	answer, ok := errors.AsType[*pgconn.PgError](err)
	return errors.Is(err, pgcall.ErrSilent) || ok && answer.Code == queryCanceled
}

// Statement selects the due rows of a table.
type Statement struct {
	// Table is qualified and quoted.
	Table string
	// ID is a column that identifies rows: a key, or ctid, which is unique in one partition only.
	ID string
	// Also is a condition that holds for every due row. ctid needs it, because rows of two partitions can share a
	// ctid. "" means none.
	Also string
	// Due is a condition that an index serves, and the order of that index: the text after WHERE.
	Due string
	// Args are the parameters of Due.
	Args []any
}

// DeleteSQL deletes rows and skips locked ones. It returns the number of rows it chose, and the number it deleted,
// which is lower if a trigger or a policy of the table drops the change. The parameters after Args are the limit and
// the number of rows to skip at the start.
func (s Statement) DeleteSQL() string {
	also := ""
	if s.Also != "" {
		also = " AND (" + s.Also + ") IS TRUE" // no index serves it, so the rows are looked up by their ID
	}
	return fmt.Sprintf(`WITH due AS MATERIALIZED (SELECT %[2]s AS id FROM %[1]s WHERE %[3]s LIMIT $%[4]d OFFSET $%[5]d FOR UPDATE SKIP LOCKED),
gone AS (DELETE FROM %[1]s WHERE %[2]s = ANY(ARRAY(SELECT id FROM due))`, s.Table, s.ID, s.Due, len(s.Args)+1, len(s.Args)+2) + also + ` RETURNING 1)
SELECT (SELECT count(*) FROM due), (SELECT count(*) FROM gone)`
}

// nameSQL returns the ID of a row, for people. The parameter after Args is the number of rows before it.
func (s Statement) nameSQL() string {
	return fmt.Sprintf(`SELECT %s::text FROM %s WHERE %s LIMIT 1 OFFSET $%d`, s.ID, s.Table, s.Due, len(s.Args)+1)
}

// countSQL counts the due rows, locked or not. The parameter after Args is the limit.
func (s Statement) countSQL() string {
	return fmt.Sprintf(`SELECT count(*) FROM (SELECT FROM %s WHERE %s LIMIT $%d) due`, s.Table, s.Due, len(s.Args)+1)
}

func (s Statement) args(more ...any) []any { return append(slices.Clone(s.Args), more...) }

// MaxCount is the highest number that Count returns for one statement.
const MaxCount = 100_000

// Count returns how many rows Prune would delete now. No statement counts above MaxCount.
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
