package inboxpgx

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"

	"github.com/holdfast-go/holdfast/internal/migrate"
	"github.com/holdfast-go/holdfast/internal/sqlident"
)

//go:embed migrations/*.sql
var migrations embed.FS

// attemptsSuffix makes the name of the ledger's table out of that of the entries.
const attemptsSuffix = "_attempts"

// stoppedSuffix and waitingSuffix make the names of the tables of stopped ordering keys and of their messages.
const (
	stoppedSuffix = "_stopped"
	waitingSuffix = "_waiting"
)

// pauseSuffix makes that of the consumers that are paused.
const pauseSuffix = "_pause"

// tables are the quoted names of a Store's tables.
type tables struct {
	schema, bare                               string // as configured
	entries, attempts, stopped, waiting, pause string // qualified and quoted
}

func newTables(schema, table string) (tables, error) {
	entries, err1 := sqlident.Qualify(schema, table)
	attempts, err2 := sqlident.Qualify(schema, table+attemptsSuffix)
	stopped, err3 := sqlident.Qualify(schema, table+stoppedSuffix)
	waiting, err4 := sqlident.Qualify(schema, table+waitingSuffix)
	pause, err5 := sqlident.Qualify(schema, table+pauseSuffix)
	if err := errors.Join(err1, err2, err3, err4, err5); err != nil {
		return tables{}, fmt.Errorf("inboxpgx: table name: %w", err)
	}
	return tables{schema, table, entries, attempts, stopped, waiting, pause}, nil
}

// missing explains the errors of a database without the tables.
func (t tables) missing() migrate.Missing {
	return migrate.Missing{Call: "Store.Migrate of inboxpgx", Tables: []string{t.entries, t.attempts, t.stopped, t.waiting, t.pause}}
}

func (t tables) set() (migrate.Set, error) {
	files, err := fs.Sub(migrations, "migrations")
	return migrate.Set{
		Component: "inbox", Files: files, Schema: t.schema,
		Names: map[string]string{
			"table": t.bare, "attempts": t.bare + attemptsSuffix, "stopped": t.bare + stoppedSuffix, "waiting": t.bare + waitingSuffix,
			"pause": t.bare + pauseSuffix,
		},
	}, err
}

// Migrate creates the tables or brings them up to date. Several processes may do so at once.
// With Config.Entries there is nothing to do.
func (s *Store) Migrate(ctx context.Context) error {
	if s.table == nil {
		return nil
	}
	set, err := s.table.names.set()
	if err != nil {
		return fmt.Errorf("inboxpgx: %w", err)
	}
	return migrate.Apply(ctx, s.pool, set)
}

// Schema returns the numbered SQL files that Migrate applies, and the .down.sql files that undo them,
// for a migration tool. No other package has the same numbers. Each file notes that it was applied:
// Migrate finds done what the tool has done. With Config.Entries there are no files.
func (s *Store) Schema() fs.FS {
	if s.table == nil {
		return embed.FS{}
	}
	return s.table.files
}
