package idempotencypgx

import (
	"github.com/holdfast-go/holdfast/internal/migrate"
	"github.com/holdfast-go/holdfast/internal/sqlident"
)

// Grants returns what a role of the database needs for one job and no more, each the text between GRANT
// and TO. The job "idempotency" is that of the middleware and of Do, "operate" is Look, Check and Prune.
// Of another job it is nil, and with Config.Records too.
func (s *Store) Grants(job string) []string {
	noted := migrate.Grant(s.cfg.Schema) // so that Migrate finds that nothing is to be done
	switch {
	case s.table == nil:
	case job == "idempotency":
		return sqlident.Granted(s.cfg.Schema, append(noted, `SELECT, INSERT, UPDATE, DELETE ON `+s.table.name)...)
	case job == "operate":
		return sqlident.Granted(s.cfg.Schema, append(noted, `SELECT, UPDATE (token), DELETE ON `+s.table.name)...)
	}
	return nil
}
