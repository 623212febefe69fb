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

// Schema returns what Migrate does as numbered SQL files, for a migration tool.
func (s *Store) Schema() fs.FS { return s.schema }
