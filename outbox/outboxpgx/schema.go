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

// defaultTable is the default name of the messages table.
const defaultTable = "holdfast_outbox"

// maxTable leaves room for the suffixes of the other tables and their indexes.
const maxTable = 40

//go:embed migrations/*.sql
var files embed.FS

// Migrate creates the tables or updates them. Any number of processes may call it at once.
func (s *Store) Migrate(ctx context.Context) error {
	if err := migrate.Apply(ctx, s.pool, s.set); err != nil {
		return fmt.Errorf("outboxpgx: %w", err)
	}
	return nil
}

// Schema returns the numbered SQL files that Migrate applies, and the .down.sql files that undo them, for a migration
// tool. No other package uses the same numbers. Each file records that it was applied, so Migrate skips files that
// the tool has applied.
func (s *Store) Schema() fs.FS { return s.schema }

// migrations returns the files in the form for Migrate and in the form for Schema.
func migrations(schema, table string) (migrate.Set, fs.FS, error) {
	embedded, err := fs.Sub(files, "migrations")
	if err != nil {
		return migrate.Set{}, nil, fmt.Errorf("outboxpgx: %w", err)
	}
	set := migrate.Set{
		Component: "outbox", Files: embedded, Schema: schema,
		Names: map[string]string{
			"table": table, "lanes": table + "_lanes", "dead": table + "_dead", "audit": table + "_audit", "pause": table + "_pause", "dedup": table + "_dedup",
			"write": table + "_write", "claim": table + "_claim", "record": table + "_record", "settle": table + "_settle", "ignored": table + "_ignored", "look": table + "_look",
		},
	}
	exported, err := migrate.Export(set)
	if err != nil {
		return migrate.Set{}, nil, fmt.Errorf("outboxpgx: %w", err)
	}
	return set, exported, nil
}

// tables has the qualified and quoted names of the tables, the functions and the identity column's sequence.
type tables struct {
	outbox, lanes, dead, audit, pause, dedup              string
	write, claim, settle, record, look, ignored, sequence string
}

func tablesOf(schema, table string) (tables, error) {
	if len(table) > maxTable {
		return tables{}, fmt.Errorf("outboxpgx: Config.Table: %q is longer than %d characters", table, maxTable)
	}
	var t tables
	for suffix, name := range map[string]*string{
		"": &t.outbox, "_lanes": &t.lanes, "_dead": &t.dead, "_audit": &t.audit, "_pause": &t.pause, "_dedup": &t.dedup,
		"_write": &t.write, "_claim": &t.claim, "_settle": &t.settle, "_record": &t.record, "_ignored": &t.ignored, "_look": &t.look, "_seq_seq": &t.sequence,
	} {
		var err error
		if *name, err = sqlident.Qualify(schema, table+suffix); err != nil {
			return tables{}, fmt.Errorf("outboxpgx: Config.Schema and Config.Table: %w", err)
		}
	}
	return t, nil
}

// explain improves the error of a call that used tables or functions which do not exist.
func (t tables) explain(err error) error { return t.missing().Explain(err) }

func (t tables) missing() migrate.Missing {
	return migrate.Missing{Call: "Store.Migrate", Tables: []string{t.outbox, t.lanes, t.dead, t.audit, t.pause, t.dedup, t.claim, t.settle, t.record, t.look, t.ignored}}
}

// fill puts the names into a statement.
func (t tables) fill(sql string) string {
	return strings.NewReplacer("{outbox}", t.outbox, "{lanes}", t.lanes, "{dead}", t.dead,
		"{audit}", t.audit, "{pause}", t.pause, "{sequence}", t.sequence, "{dedup}", t.dedup,
		"{claim}", t.claim, "{settle}", t.settle, "{look}", t.look, "{ignored}", t.ignored, "{columns}", columns,
		"{outboxName}", literal(t.outbox), "{lanesName}", literal(t.lanes), "{deadName}", literal(t.dead), "{auditName}", literal(t.audit)).Replace(sql)
}

// literal converts a qualified and quoted name to a text literal.
func literal(name string) string {
	return "'" + strings.ReplaceAll(strings.ReplaceAll(name, `"`, ""), "'", "''") + "'"
}

// Grants returns the privileges that a database role needs for one job, each in the form of the text between GRANT
// and TO. The jobs are "write" (Write, WriteOnce and the writing function), "relay" (a relay and its pruning) and
// "operate" (DeadLetters, Parked, Waiting, Depth, Pause, Audit and Prune). For any other job it returns nil.
//
// Locking a row requires the privilege to change one of its columns. A job that locks rows without changing them gets
// this privilege for a column that nothing reads, or that the server fills.
func (s *Store) Grants(job string) []string {
	t := s.t
	noted := migrate.Grant(s.cfg.Schema) // so that Migrate can see that nothing is left to apply
	// Pruning is part of two jobs.
	prunes := append(noted,
		`SELECT (id, at), UPDATE (id), DELETE ON `+t.audit,
		`SELECT (key, expires_at), UPDATE (expires_at), DELETE ON `+t.dedup)
	// When a message becomes a dead letter again, it replaces all columns but the id. The server counts this as
	// reading the id.
	const dead = columns + `, seq, created_at, attempts, error_class, last_error`
	again := strings.TrimPrefix(dead, "id, ") + ", died_at"
	switch job {
	case "write":
		return sqlident.Granted(s.cfg.Schema, append(noted,
			`INSERT (`+columns+`, due_at) ON `+t.outbox,
			`SELECT, INSERT (key, id, expires_at), UPDATE (id, expires_at) ON `+t.dedup,
			`EXECUTE ON FUNCTION `+t.write+`, `+t.ignored)...)
	case "relay":
		return sqlident.Granted(s.cfg.Schema, append(prunes,
			`SELECT, UPDATE (published_at, due_at, held, attempts, error_class, last_error), DELETE ON `+t.outbox,
			`SELECT, UPDATE (token, lease_until, floor, batch, suspect, alone, losses, era) ON `+t.lanes,
			`SELECT ON `+t.pause,
			`SELECT, INSERT (`+dead+`), UPDATE (`+again+`) ON `+t.dead,
			`EXECUTE ON FUNCTION `+t.claim+`, `+t.settle+`, `+t.record+`, `+t.look+`, `+t.ignored)...)
	case "operate":
		return sqlident.Granted(s.cfg.Schema, append(prunes,
			`SELECT, INSERT (`+columns+`, created_at, due_at), UPDATE (held, due_at), DELETE ON `+t.outbox,
			`SELECT, UPDATE (alone) ON `+t.lanes,
			`SELECT ON SEQUENCE `+t.sequence,
			`SELECT, UPDATE (fingerprint), DELETE ON `+t.dead,
			`SELECT, INSERT (part, actor, reason), UPDATE (actor, reason), DELETE ON `+t.pause,
			`SELECT, INSERT (actor, reason, action, count, filter), UPDATE (count) ON `+t.audit,
			`EXECUTE ON FUNCTION `+t.ignored)...)
	}
	return nil
}
