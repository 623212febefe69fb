package outboxpgx

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/migrate"
	"github.com/holdfast-go/holdfast/internal/sqlident"
)

// DefaultTable is the name of the table of messages where none is configured.
const DefaultTable = "holdfast_outbox"

// maxTable leaves room for the suffixes of the other tables and their indexes.
const maxTable = 40

//go:embed migrations/*.sql
var files embed.FS

// SchemaConfig says where the tables are. All parts of one outbox must agree on it.
type SchemaConfig struct {
	// Schema holds the tables. Empty means that the search path decides.
	Schema string
	// Table is the name of the table of messages, at most 40 characters; the others are named after
	// it, with _lanes, _dead, _audit and _dedup behind. Empty means DefaultTable.
	Table string
}

// Migrate creates the tables or brings them up to date. Any number of processes may call it at
// once.
func Migrate(ctx context.Context, pool *pgxpool.Pool, cfg SchemaConfig) error {
	if pool == nil {
		return errors.New("outboxpgx: Migrate needs a pool")
	}
	set, err := cfg.set()
	if err != nil {
		return err
	}
	if err := migrate.Apply(ctx, pool, set); err != nil {
		return fmt.Errorf("outboxpgx: %w", err)
	}
	return nil
}

// Migrations returns the numbered SQL files that Migrate applies, for a migration tool.
func Migrations(cfg SchemaConfig) (fs.FS, error) {
	set, err := cfg.set()
	if err != nil {
		return nil, err
	}
	exported, err := migrate.Export(set)
	if err != nil {
		return nil, fmt.Errorf("outboxpgx: %w", err)
	}
	return exported, nil
}

func (c SchemaConfig) set() (migrate.Set, error) {
	c = c.withDefaults()
	if _, err := c.tables(); err != nil {
		return migrate.Set{}, err
	}
	sub, err := fs.Sub(files, "migrations")
	return migrate.Set{
		Component: "outbox", Files: sub, Schema: c.Schema,
		Names: map[string]string{"table": c.Table, "lanes": c.Table + "_lanes", "dead": c.Table + "_dead", "audit": c.Table + "_audit", "dedup": c.Table + "_dedup"},
	}, err
}

func (c SchemaConfig) withDefaults() SchemaConfig {
	if c.Table == "" {
		c.Table = DefaultTable
	}
	return c
}

// tables are the qualified and quoted names.
type tables struct {
	outbox, lanes, dead, audit, dedup string
}

func (c SchemaConfig) tables() (tables, error) {
	c = c.withDefaults()
	if len(c.Table) > maxTable {
		return tables{}, fmt.Errorf("outboxpgx: SchemaConfig.Table: %q is longer than %d characters", c.Table, maxTable)
	}
	outbox, err1 := sqlident.Qualify(c.Schema, c.Table)
	lanes, err2 := sqlident.Qualify(c.Schema, c.Table+"_lanes")
	dead, err3 := sqlident.Qualify(c.Schema, c.Table+"_dead")
	audit, err4 := sqlident.Qualify(c.Schema, c.Table+"_audit")
	dedup, err5 := sqlident.Qualify(c.Schema, c.Table+"_dedup")
	if err := errors.Join(err1, err2, err3, err4, err5); err != nil {
		return tables{}, fmt.Errorf("outboxpgx: SchemaConfig: %w", err)
	}
	return tables{outbox, lanes, dead, audit, dedup}, nil
}

// explain tells of tables that were never created.
func (t tables) explain(err error) error { return t.missing().Explain(err) }

func (t tables) missing() migrate.Missing {
	return migrate.Missing{Call: "outboxpgx.Migrate", Tables: []string{t.outbox, t.lanes, t.dead, t.audit, t.dedup}}
}

// fill puts the names into a statement.
func (t tables) fill(sql string) string {
	return strings.NewReplacer("{outbox}", t.outbox, "{lanes}", t.lanes, "{dead}", t.dead,
		"{audit}", t.audit, "{dedup}", t.dedup, "{columns}", columns).Replace(sql)
}
