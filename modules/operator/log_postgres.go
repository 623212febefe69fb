package operator

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// logTimeout bounds each statement of a PostgresLog.
const logTimeout = 10 * time.Second

// logTable is where a PostgresLog keeps actions, in the schema that the search path decides.
const logTable = "holdfast_operator_log"

//go:embed migrations/*.sql
var logFiles embed.FS

//go:embed migrations/0007_operator_log.sql
var createLogSQL string

// PostgresLog keeps actions in a table, for a year. It is safe for concurrent use.
type PostgresLog struct {
	pool *pgxpool.Pool
}

// NewPostgresLog returns a log on the pool. Migrate makes its table.
func NewPostgresLog(pool *pgxpool.Pool) (*PostgresLog, error) {
	if pool == nil {
		return nil, errors.New("operator: the pool of the log is nil")
	}
	return &PostgresLog{pool}, nil
}

// undefinedTable is the SQLSTATE of a table that does not exist.
const undefinedTable = "42P01"

// migrateLock makes those wait that create the table at the same time.
const migrateLock = 7_204_118_332

// Migrate creates the table if there is none. Several processes may do so at once.
func (l *PostgresLog) Migrate(ctx context.Context) error {
	return l.within(ctx, "migrate", func(ctx context.Context) error {
		var made bool // then a role needs no right to create it
		if err := l.pool.QueryRow(ctx, "SELECT to_regclass($1) IS NOT NULL", logTable).Scan(&made); err == nil && made {
			return nil
		}
		return pgx.BeginFunc(ctx, l.pool, func(tx pgx.Tx) error {
			// The lock must not outlive a connection that falls silent.
			if _, err := tx.Exec(ctx, "SELECT set_config('idle_in_transaction_session_timeout', '5s', true)"); err != nil {
				return err
			}
			if _, err := tx.Exec(ctx, "SELECT pg_advisory_xact_lock($1)", int64(migrateLock)); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, createLogSQL)
			return err
		})
	})
}

// Schema returns the SQL file that Migrate applies, and the one that undoes it, as the packages of
// Holdfast do.
func (l *PostgresLog) Schema() fs.FS {
	files, err := fs.Sub(logFiles, "migrations")
	if err != nil {
		return embed.FS{} // the folder is there: it is compiled in
	}
	return files
}

// Check returns what keeps actions from being noted, or nil.
func (l *PostgresLog) Check(ctx context.Context) error {
	_, err := l.List(ctx, LogFilter{Limit: 1})
	if failed, ok := errors.AsType[*pgconn.PgError](err); ok && failed.Code == undefinedTable {
		return missingLog{}
	}
	return err
}

// missingLog is a finding of Check.
type missingLog struct{}

func (missingLog) Error() string { return "operator: the table " + logTable + " is missing" }

// Mend says what to do.
func (missingLog) Mend() string { return "call PostgresLog.Migrate, or the command setup" }

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
			WHERE NOT ($1 AND what = ANY($2)) ORDER BY id DESC LIMIT $3`, f.WithoutUpkeep, upkeep, f.Limit)
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

// Grants returns what the role of an operator needs, as the packages of Holdfast do.
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
