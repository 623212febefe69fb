package outboxpgx

import (
	"context"
	"embed"
	"fmt"
	"io/fs"
	"strings"

	"github.com/holdfast-go/holdfast/internal/migrate"
	"github.com/holdfast-go/holdfast/internal/sqlident"
)

// defaultTable is the name of the table of messages where none is configured.
const defaultTable = "holdfast_outbox"

// maxTable leaves room for the suffixes of the other tables and their indexes.
const maxTable = 40

//go:embed migrations/*.sql
var files embed.FS

// Migrate creates the tables or brings them up to date. Any number of processes may call it at once.
func (s *Store) Migrate(ctx context.Context) error {
	if err := migrate.Apply(ctx, s.pool, s.set); err != nil {
		return fmt.Errorf("outboxpgx: %w", err)
	}
	return nil
}

// Schema returns the numbered SQL files that Migrate applies, and the .down.sql files that undo them,
// for a migration tool. No other package has the same numbers. Each file notes that it was applied:
// Migrate finds done what the tool has done.
func (s *Store) Schema() fs.FS { return s.schema }

// migrations returns the files as Migrate applies them, and as Schema shows them.
func migrations(schema, table string) (migrate.Set, fs.FS, error) {
	embedded, err := fs.Sub(files, "migrations")
	if err != nil {
		return migrate.Set{}, nil, fmt.Errorf("outboxpgx: %w", err)
	}
	set := migrate.Set{
		Component: "outbox", Files: embedded, Schema: schema,
		Names: map[string]string{"table": table, "lanes": table + "_lanes", "dead": table + "_dead", "audit": table + "_audit", "pause": table + "_pause", "dedup": table + "_dedup", "write": table + "_write"},
	}
	exported, err := migrate.Export(set)
	if err != nil {
		return migrate.Set{}, nil, fmt.Errorf("outboxpgx: %w", err)
	}
	return set, exported, nil
}

// tables are the qualified and quoted names, those of the function for other programs and of the identity
// column's sequence among them.
type tables struct {
	outbox, lanes, dead, audit, pause, dedup, write, sequence string
}

func tablesOf(schema, table string) (tables, error) {
	if len(table) > maxTable {
		return tables{}, fmt.Errorf("outboxpgx: Config.Table: %q is longer than %d characters", table, maxTable)
	}
	var names [8]string
	for i, suffix := range []string{"", "_lanes", "_dead", "_audit", "_pause", "_dedup", "_write", "_seq_seq"} {
		name, err := sqlident.Qualify(schema, table+suffix)
		if err != nil {
			return tables{}, fmt.Errorf("outboxpgx: Config.Schema and Config.Table: %w", err)
		}
		names[i] = name
	}
	return tables{names[0], names[1], names[2], names[3], names[4], names[5], names[6], names[7]}, nil
}

// explain names tables that were never created.
func (t tables) explain(err error) error { return t.missing().Explain(err) }

func (t tables) missing() migrate.Missing {
	return migrate.Missing{Call: "Store.Migrate", Tables: []string{t.outbox, t.lanes, t.dead, t.audit, t.pause, t.dedup}}
}

// fill puts the names into a statement.
func (t tables) fill(sql string) string {
	return strings.NewReplacer("{outbox}", t.outbox, "{lanes}", t.lanes, "{dead}", t.dead,
		"{audit}", t.audit, "{pause}", t.pause, "{sequence}", t.sequence, "{dedup}", t.dedup, "{columns}", columns).Replace(sql)
}
