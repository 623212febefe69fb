// Package migrate applies the numbered SQL files that a package embeds, each once. Several processes may do so at the same
// time.
package migrate

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/internal/sqlident"
)

// versionsTable records the applied files, per component and main table.
const versionsTable = "holdfast_migrations"

// maxName leaves room for the suffix of an index, because PostgreSQL truncates long names.
const maxName = 48

// Set is the schema of one component.
type Set struct {
	// Component names the owner, such as "outbox".
	Component string
	// Files are the migrations, named 0001_create.sql, 0007_…. Each is applied as a whole, in the order of its number. No
	// other component uses the same number. 0001_create.down.sql undoes one, but Apply never does. A released file never
	// changes.
	Files fs.FS
	// Schema holds the tables. Empty: the search path decides.
	Schema string
	// Names maps a placeholder to a table's name. {{table}} in a file becomes the qualified and quoted Names["table"].
	// {{raw.table}} becomes the bare name, for names of indexes and constraints: quote them, else they lose their case.
	Names map[string]string
}

// timeout bounds an Apply, including its wait for another Apply.
const timeout = 5 * time.Minute

// Apply brings the schema up to date in one transaction. A lock makes other calls wait until it is done. If nothing is to be
// done, the rights of Grant are enough.
func Apply(ctx context.Context, pool *pgxpool.Pool, s Set) error {
	files, err := s.render()
	if err != nil {
		return fmt.Errorf("migrate %s: %w", s.Component, err)
	}
	versions, err := sqlident.Qualify(s.Schema, versionsTable)
	if err != nil {
		return fmt.Errorf("migrate %s: %w", s.Component, err)
	}
	// READ COMMITTED, regardless of the database's default: a snapshot taken before the lock was granted would not show the
	// files that another process has applied.
	readCommitted := pgx.TxOptions{IsoLevel: pgx.ReadCommitted}
	err = pgcall.Within(ctx, pool, timeout, func(ctx context.Context, conn *pgxpool.Conn) error {
		if s.done(ctx, conn, versions, files) {
			return nil
		}
		return pgx.BeginTxFunc(ctx, conn, readCommitted, func(tx pgx.Tx) error { return s.apply(ctx, tx, versions, files) })
	})
	if err != nil {
		return fmt.Errorf("migrate %s: %w", s.Component, err)
	}
	return nil
}

// Grant returns the privileges that a role needs to see that nothing is to be done: the text between GRANT and TO. It
// returns nil for an invalid schema.
func Grant(schema string) []string {
	versions, err := sqlident.Qualify(schema, versionsTable)
	if err != nil {
		return nil
	}
	return []string{"SELECT ON " + versions}
}

// done reports whether the last file is known to be applied. It ignores errors, such as a missing table: apply meets them
// again.
func (s Set) done(ctx context.Context, conn *pgxpool.Conn, versions string, files []file) bool {
	last := 0
	for _, f := range files {
		last = max(last, f.version)
	}
	applied, err := s.applied(ctx, conn, versions)
	return err == nil && applied >= last
}

type querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// applied returns the number of the last applied file.
func (s Set) applied(ctx context.Context, q querier, versions string) (version int, err error) {
	err = q.QueryRow(ctx, `SELECT coalesce(max(version), 0) FROM `+versions+` WHERE component = $1`, s.key()).Scan(&version)
	return version, err
}

func (s Set) apply(ctx context.Context, tx pgx.Tx, versions string, files []file) error {
	// The lock must not outlive a silent connection.
	if _, err := tx.Exec(ctx, `SELECT set_config('idle_in_transaction_session_timeout', '5s', true)`); err != nil {
		return err
	}
	// The advisory lock is needed because CREATE … IF NOT EXISTS of two
	// sessions can still collide in the catalogue.
	if _, err := tx.Exec(ctx, `SELECT pg_advisory_xact_lock(hashtextextended($1, 0))`, versionsTable); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, createVersions(versions)); err != nil {
		return err
	}
	applied, err := s.applied(ctx, tx, versions)
	if err != nil {
		return err
	}
	for _, f := range files {
		if f.down || f.version <= applied {
			continue
		}
		if _, err := tx.Exec(ctx, f.sql); err != nil {
			return fmt.Errorf("%s: %w", f.name, err)
		}
		if _, err := tx.Exec(ctx, `INSERT INTO `+versions+` (component, version) VALUES ($1, $2)`, s.key(), f.version); err != nil {
			return err
		}
	}
	return nil
}

func createVersions(table string) string {
	return `CREATE TABLE IF NOT EXISTS ` + table + ` (
		component text NOT NULL, version integer NOT NULL, applied_at timestamptz NOT NULL DEFAULT now(),
		PRIMARY KEY (component, version))`
}

// key distinguishes two sets of one component, such as two outbox tables.
func (s Set) key() string {
	return s.Component + ":" + s.Names["table"]
}

type file struct {
	name    string
	version int
	down    bool // undoes the file of its version
	sql     string
}

var (
	fileName    = regexp.MustCompile(`^(\d{4})_[a-z0-9_]+(\.down)?\.sql$`)
	placeholder = regexp.MustCompile(`\{\{[^}]*\}\}`)
)

func (s Set) render() ([]file, error) {
	replacer, err := s.replacer()
	if err != nil {
		return nil, err
	}
	names, err := fs.Glob(s.Files, "*.sql")
	if err != nil || len(names) == 0 {
		return nil, errors.Join(errors.New("no migration files"), err)
	}
	slices.Sort(names)
	var files []file
	for _, name := range names {
		match := fileName.FindStringSubmatch(name)
		if match == nil {
			return nil, fmt.Errorf("file %q is not named like 0001_create.sql", name)
		}
		text, err := fs.ReadFile(s.Files, name)
		if err != nil {
			return nil, err
		}
		version, _ := strconv.Atoi(match[1]) // four digits
		sql := replacer.Replace(string(text))
		if left := placeholder.FindString(sql); left != "" {
			return nil, fmt.Errorf("file %s: unknown placeholder %s", name, left)
		}
		files = append(files, file{name: name, version: version, down: match[2] != "", sql: sql})
	}
	return files, nil
}

func (s Set) replacer() (*strings.Replacer, error) {
	var pairs []string
	for placeholder, name := range s.Names {
		if len(name) > maxName {
			return nil, fmt.Errorf("name %q is longer than %d characters", name, maxName)
		}
		qualified, err := sqlident.Qualify(s.Schema, name)
		if err != nil {
			return nil, err
		}
		pairs = append(pairs, "{{"+placeholder+"}}", qualified, "{{raw."+placeholder+"}}", name)
	}
	return strings.NewReplacer(pairs...), nil
}

// Export returns the rendered files, for a migration tool of the user. The file system is flat, read-only and safe for
// concurrent use. Each file records that it was applied or undone, so that Apply skips files which the tool has applied.
func Export(s Set) (fs.FS, error) {
	files, err := s.render()
	if err != nil {
		return nil, fmt.Errorf("migrate %s: %w", s.Component, err)
	}
	versions, err := sqlident.Qualify(s.Schema, versionsTable)
	if err != nil {
		return nil, fmt.Errorf("migrate %s: %w", s.Component, err)
	}
	for i := range files {
		files[i].sql += s.note(files[i], versions)
	}
	return folder(files), nil
}

// note returns the statements that record a file as applied or undone.
func (s Set) note(f file, versions string) string {
	key := strings.ReplaceAll(s.key(), "'", "''")
	if f.down {
		return fmt.Sprintf("\nDELETE FROM %s WHERE component = '%s' AND version = %d;\n", versions, key, f.version)
	}
	return fmt.Sprintf("\n-- Migrate finds this file applied.\n%s;\nINSERT INTO %s (component, version) VALUES ('%s', %d) ON CONFLICT DO NOTHING;\n",
		createVersions(versions), versions, key, f.version)
}

const root = "."

// folder is a read-only file system of files, in the order of their names.
type folder []file

func (d folder) Open(name string) (fs.File, error) {
	if name == root {
		return &openFolder{left: d}, nil
	}
	for _, f := range d {
		if f.name == name {
			return openFile{strings.NewReader(f.sql), f}, nil
		}
	}
	return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
}

type openFile struct {
	*strings.Reader
	file file
}

func (f openFile) Stat() (fs.FileInfo, error) { return f.file, nil }
func (f openFile) Close() error               { return nil }

type openFolder struct{ left folder }

func (d *openFolder) Stat() (fs.FileInfo, error) { return file{name: root}, nil }
func (d *openFolder) Close() error               { return nil }
func (d *openFolder) Read([]byte) (int, error)   { return 0, fs.ErrInvalid }

func (d *openFolder) ReadDir(n int) ([]fs.DirEntry, error) {
	if n > 0 && len(d.left) == 0 {
		return nil, io.EOF
	}
	var entries []fs.DirEntry
	for len(d.left) > 0 && (n <= 0 || len(entries) < n) {
		entries = append(entries, fs.FileInfoToDirEntry(d.left[0]))
		d.left = d.left[1:]
	}
	return entries, nil
}

// A file is its own fs.FileInfo.
func (f file) Name() string       { return f.name }
func (f file) Size() int64        { return int64(len(f.sql)) }
func (f file) ModTime() time.Time { return time.Time{} }
func (f file) IsDir() bool        { return f.name == root }
func (f file) Sys() any           { return nil }

func (f file) Mode() fs.FileMode {
	if f.IsDir() {
		return fs.ModeDir | 0o555
	}
	return 0o444
}

// Missing explains errors about tables and functions that were never created.
type Missing struct {
	// Call creates the tables, such as "outboxpgx.Migrate".
	Call string
	// Tables are the names that the call creates, functions included, qualified and quoted by sqlident. Errors about other
	// names are not explained.
	Tables []string
}

// Explain adds Call to an error about a missing object of Tables. It adds pgcall.ErrIgnored to the error of a statement that
// detected that a table ignored its change. It returns every other error, and nil, unchanged.
func (m Missing) Explain(err error) error {
	answer, ok := errors.AsType[*pgconn.PgError](err)
	if ok && answer.Code == changeIgnored && !errors.Is(err, pgcall.ErrIgnored) {
		return fmt.Errorf("%w: %w", err, pgcall.ErrIgnored)
	}
	if !ok || answer.Code != undefinedTable && answer.Code != undefinedFunction && answer.Code != undefinedSchema {
		return err
	}
	for _, table := range m.Tables {
		// The message also names the schema. An unrelated table may be in the same schema, so only the table's name counts.
		name := table[strings.LastIndexByte(table, '.')+1:]
		if answer.Code == undefinedSchema {
			name, _, _ = strings.Cut(table, ".")
		}
		if strings.Contains(answer.Message, strings.Trim(name, `"`)) {
			return fmt.Errorf("call %s first: %w", m.Call, err)
		}
	}
	return err
}

const (
	undefinedTable    = "42P01"
	undefinedFunction = "42883"
	undefinedSchema   = "3F000"
	changeIgnored     = "HF001" // our own code
)

// AtCommit is txretry.AtCommit with Explain applied to the error of COMMIT.
func (m Missing) AtCommit(tx pgx.Tx, sql string, args ...any) bool {
	h, ok := tx.(interface {
		AtCommitExplained(explain func(error) error, sql string, args ...any) bool
	})
	return ok && h.AtCommitExplained(m.Explain, sql, args...)
}
