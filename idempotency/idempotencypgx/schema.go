package idempotencypgx

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/internal/chunk"
	"github.com/holdfast-go/holdfast/internal/migrate"
	"github.com/holdfast-go/holdfast/internal/sqlident"
)

const component = "idempotencypgx"

// SchemaConfig names a table of records.
type SchemaConfig struct {
	// Schema holds the table. Empty: the search path decides.
	Schema string
	// Table is its name. Empty: "holdfast_idempotency".
	Table string
}

func (c SchemaConfig) withDefaults() SchemaConfig {
	if c.Table == "" {
		c.Table = "holdfast_idempotency"
	}
	return c
}

// quoted returns the table's name for SQL text.
func (c SchemaConfig) quoted() (string, error) {
	table, err := sqlident.Qualify(c.Schema, c.Table)
	if err != nil {
		return "", fmt.Errorf("idempotencypgx: %w", err)
	}
	return table, nil
}

//go:embed migrations/*.sql
var files embed.FS

func (c SchemaConfig) set() (migrate.Set, error) {
	dir, err := fs.Sub(files, "migrations")
	if err != nil {
		return migrate.Set{}, fmt.Errorf("idempotencypgx: %w", err)
	}
	return migrate.Set{Component: component, Files: dir, Schema: c.Schema, Names: map[string]string{"table": c.Table}}, nil
}

// Migrate creates or updates the table. Several processes may call it at once.
func Migrate(ctx context.Context, pool *pgxpool.Pool, cfg SchemaConfig) error {
	set, err := cfg.withDefaults().set()
	if err != nil {
		return err
	}
	return migrate.Apply(ctx, pool, set)
}

// Migrations returns what Migrate does as numbered SQL files, for a migration
// tool.
func Migrations(cfg SchemaConfig) (fs.FS, error) {
	set, err := cfg.withDefaults().set()
	if err != nil {
		return nil, err
	}
	return migrate.Export(set)
}

// pruneBatch bounds the rows, and so the locks, of one statement.
const pruneBatch = 1000

// Prune deletes the records whose retention is over and returns their number,
// also with an error. Call it now and then; several callers share the work.
func Prune(ctx context.Context, pool *pgxpool.Pool, cfg SchemaConfig) (int64, error) {
	table, err := cfg.withDefaults().quoted()
	if err != nil {
		return 0, err
	}
	n, err := chunk.Delete(ctx, pool, pruneBatch, `DELETE FROM `+table+` WHERE key IN (
		SELECT key FROM `+table+`
		WHERE expires_at <= clock_timestamp() AND (lease_until IS NULL OR lease_until <= clock_timestamp())
		ORDER BY expires_at LIMIT $1 FOR UPDATE SKIP LOCKED)`)
	if err != nil {
		return n, fmt.Errorf("idempotencypgx: prune: %w", newAsker(pool, table).missing.Explain(err))
	}
	return n, nil
}

// check reports a table that is not there, or is not as this version needs it.
func (a *asker) check(ctx context.Context, table string) ([]idempotency.Finding, error) {
	_, err := a.exec(ctx, false, `SELECT key, status, created_at, expires_at, lease_until, `+recordColumns+` FROM `+table+` LIMIT 0`)
	if err == nil {
		return nil, nil
	}
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		switch pgErr.Code {
		case "42P01", "3F000", "42703": // undefined table, schema, column
			return []idempotency.Finding{{
				Component: component,
				Problem:   "table " + table + " is missing or out of date: " + pgErr.Message,
				Mend:      "call idempotencypgx.Migrate, or apply the files of idempotencypgx.Migrations",
			}}, nil
		}
	}
	return nil, fmt.Errorf("idempotencypgx: check: %w", err)
}
