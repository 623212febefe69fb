package operator

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Log records the actions of operators. *PostgresLog and *MemoryLog implement it. Its methods are safe for
// concurrent use.
type Log interface {
	// Begin records an action before anything is changed, and returns its number.
	Begin(ctx context.Context, a Action) (int64, error)
	// End adds the outcome. An action without an end was interrupted.
	End(ctx context.Context, number int64, count int, failure string) error
	// List returns the newest actions that match the filter, the newest first. It leaves out actions that ended without a change
	// and without a failure, such as a retry of one id in every consumer but its own.
	List(ctx context.Context, f LogFilter) ([]Action, error)
}

// LogFilter chooses actions.
type LogFilter struct {
	// Limit bounds the number of actions; at least 1.
	Limit int
	// WithoutUpkeep leaves out actions that a service also runs by itself: see IsUpkeep.
	WithoutUpkeep bool
}

// Action is one action of an operator.
type Action struct {
	// At is the time at which it started. For upkeep without --by and --reason it is the time at which it ended.
	At time.Time `json:"at"`
	// What is the command, such as "retry". On is the part that it changed, and Chosen the selection within
	// the part.
	What   string `json:"what"`
	On     string `json:"on"`
	Chosen string `json:"chosen"`
	By     string `json:"by"`
	Reason string `json:"reason"`
	// Count is how many were changed; nil: unknown, because the action did not end.
	Count *int `json:"count"`
	// Failure is the reason why not everything was done. Empty: it was.
	Failure string `json:"failure,omitempty"`
}

// upkeep are the commands that a service also runs by itself.
var upkeep = []string{"sweep", "prune", "setup"}

// IsUpkeep reports whether a service also does this by itself: sweep, prune and setup.
func (a Action) IsUpkeep() bool { return slices.Contains(upkeep, a.What) }

// changedNothing reports whether an action ended without a change and without a failure.
func (a Action) changedNothing() bool { return a.Count != nil && *a.Count == 0 && a.Failure == "" }

// logKept is how many actions a MemoryLog keeps.
const logKept = 1000

// MemoryLog keeps the last 1,000 actions in memory, for a service on fakes. The zero value is empty.
type MemoryLog struct {
	mu    sync.Mutex
	first int64 // number of the oldest that is kept
	kept  []Action
}

// Begin implements Log.
func (l *MemoryLog) Begin(_ context.Context, a Action) (int64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a.At, a.Count = time.Now(), nil
	if len(l.kept) == logKept {
		l.kept = append(l.kept[:0:0], l.kept[1:]...)
		l.first++
	}
	l.kept = append(l.kept, a)
	return l.first + int64(len(l.kept)) - 1, nil
}

// End implements Log.
func (l *MemoryLog) End(_ context.Context, number int64, count int, failure string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if i := number - l.first; i >= 0 && i < int64(len(l.kept)) {
		l.kept[i].Count, l.kept[i].Failure = &count, failure
	}
	return nil
}

// List implements Log.
func (l *MemoryLog) List(_ context.Context, f LogFilter) ([]Action, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var newest []Action
	for i := len(l.kept) - 1; i >= 0 && len(newest) < f.Limit; i-- {
		if a := l.kept[i]; !a.changedNothing() && (!f.WithoutUpkeep || !a.IsUpkeep()) {
			newest = append(newest, l.kept[i])
		}
	}
	return newest, nil
}

// logTimeout bounds each statement of a PostgresLog.
const logTimeout = 10 * time.Second

// logTable is the table of a PostgresLog, in the schema of the search path.
const logTable = "holdfast_operator_log"

//go:embed migrations/0007_*.sql
var logFiles embed.FS

//go:embed migrations/0007_operator_log.sql
var createLogSQL string

// PostgresLog keeps actions in a table, for a year. It is safe for concurrent use.
type PostgresLog struct {
	pool *pgxpool.Pool
}

// NewPostgresLog returns a log on the pool. Migrate creates its table.
func NewPostgresLog(pool *pgxpool.Pool) (*PostgresLog, error) {
	if pool == nil {
		return nil, errors.New("operator: the pool of the log is nil")
	}
	return &PostgresLog{pool}, nil
}

// undefinedTable is the SQLSTATE of a table that does not exist.
const undefinedTable = "42P01"

// migrateLock is the key of the advisory lock that serializes Migrate.
const migrateLock = 7_204_118_332

// Migrate creates the table if there is none. Several processes may call it at once.
func (l *PostgresLog) Migrate(ctx context.Context) error {
	return l.within(ctx, "migrate", func(ctx context.Context) error { return createTable(ctx, l.pool, logTable, createLogSQL) })
}

// createTable creates a table if there is none.
func createTable(ctx context.Context, pool *pgxpool.Pool, table, sql string) error {
	var made bool // if it exists, the role needs no right to create it
	if err := pool.QueryRow(ctx, "SELECT to_regclass($1) IS NOT NULL", table).Scan(&made); err == nil && made {
		return nil
	}
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		// A connection that falls silent must not keep the lock.
		if _, err := tx.Exec(ctx, "SELECT set_config('idle_in_transaction_session_timeout', '5s', true)"); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, "SELECT pg_advisory_xact_lock($1)", int64(migrateLock)); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, sql)
		return err
	})
}

// Schema returns the SQL file that Migrate applies, and the file that undoes it, as the packages of
// Holdfast do.
func (l *PostgresLog) Schema() fs.FS { return migrationsIn(logFiles) }

// migrationsIn returns the folder of embedded migrations.
func migrationsIn(all embed.FS) fs.FS {
	files, err := fs.Sub(all, "migrations")
	if err != nil {
		return embed.FS{} // the folder is there: it is compiled in
	}
	return files
}

// Check returns the reason why actions cannot be logged, or nil.
func (l *PostgresLog) Check(ctx context.Context) error {
	_, err := l.List(ctx, LogFilter{Limit: 1})
	if failed, ok := errors.AsType[*pgconn.PgError](err); ok && failed.Code == undefinedTable {
		return missingTable{logTable, "call PostgresLog.Migrate, or the command setup"}
	}
	return err
}

// missingTable is a finding of Check.
type missingTable struct{ table, fix string }

func (m missingTable) Error() string { return "operator: the table " + m.table + " is missing" }

// Fix returns the fix.
func (m missingTable) Fix() string { return m.fix }

// Begin implements Log.
func (l *PostgresLog) Begin(ctx context.Context, a Action) (number int64, err error) {
	err = l.within(ctx, "begin", func(ctx context.Context) error {
		return l.pool.QueryRow(ctx, `
			WITH old AS (DELETE FROM `+logTable+` WHERE at < now() - interval '1 year')
			INSERT INTO `+logTable+` (what, part, chosen, actor, reason) VALUES ($1, $2, $3, $4, $5) RETURNING id`,
			a.What, a.On, a.Chosen, a.By, a.Reason).Scan(&number)
	})
	return number, err
}

// End implements Log. An action that is no longer in the log is no error.
func (l *PostgresLog) End(ctx context.Context, number int64, count int, failure string) error {
	return l.within(ctx, "end", func(ctx context.Context) error {
		var ignored bool
		err := l.pool.QueryRow(ctx, `
			WITH ended AS (UPDATE `+logTable+` SET count = $2, failure = $3 WHERE id = $1 RETURNING 1)
			SELECT NOT EXISTS (SELECT FROM ended) AND EXISTS (SELECT FROM `+logTable+` WHERE id = $1)`, number, count, failure).Scan(&ignored)
		if err == nil && ignored {
			err = fmt.Errorf("table %s ignored the outcome of action %d: a trigger, rule or policy dropped it", logTable, number)
		}
		return err
	})
}

// List implements Log.
func (l *PostgresLog) List(ctx context.Context, f LogFilter) (actions []Action, err error) {
	err = l.within(ctx, "list", func(ctx context.Context) error {
		rows, err := l.pool.Query(ctx, `SELECT at, what, part, chosen, actor, reason, count, failure FROM `+logTable+`
			WHERE NOT ($1 AND what = ANY($2)) AND (count IS DISTINCT FROM 0 OR failure <> '') ORDER BY id DESC LIMIT $3`, f.WithoutUpkeep, upkeep, f.Limit)
		if err != nil {
			return err
		}
		actions, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (a Action, err error) {
			return a, row.Scan(&a.At, &a.What, &a.On, &a.Chosen, &a.By, &a.Reason, &a.Count, &a.Failure)
		})
		return err
	})
	return actions, err
}

// Grants returns the privileges that the role of an operator needs, as the packages of Holdfast do.
func (l *PostgresLog) Grants(job string) []string {
	if job != "operate" {
		return nil
	}
	return []string{"SELECT, INSERT (what, part, chosen, actor, reason), UPDATE (count, failure), DELETE ON " + logTable}
}

func (l *PostgresLog) within(ctx context.Context, what string, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, logTimeout)
	defer cancel()
	if err := do(ctx); err != nil {
		return fmt.Errorf("operator: log: %s: %w", what, err)
	}
	return nil
}
