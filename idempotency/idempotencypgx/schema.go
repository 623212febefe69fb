package idempotencypgx

import (
	"embed"
	"fmt"
	"io/fs"

	"github.com/holdfast-go/holdfast/internal/migrate"
)

const component = "idempotencypgx"

//go:embed migrations/*.sql
var files embed.FS

func (c Config) set() (migrate.Set, error) {
	dir, err := fs.Sub(files, "migrations")
	if err != nil {
		return migrate.Set{}, fmt.Errorf("idempotencypgx: %w", err)
	}
	return migrate.Set{Component: component, Files: dir, Schema: c.Schema, Names: map[string]string{"table": c.Table}}, nil
}

// Schema returns the numbered SQL files that Migrate applies, and the .down.sql files that undo them,
// for a migration tool. No other package has the same numbers. Each file notes that it was applied:
// Migrate finds done what the tool has done.
func (s *Store) Schema() fs.FS { return s.schema }
