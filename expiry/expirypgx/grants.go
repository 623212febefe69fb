package expirypgx

import (
	"strings"

	"github.com/holdfast-go/holdfast/internal/sqlident"
)

// Grants returns what a role of the database needs for one job and no more, each the text between GRANT
// and TO. The job "sweep" is that of a sweeper, beside what Config.Emit does; "operate" is Look, Overdue
// and Check. Of another job it is nil.
func (s *Store) Grants(job string) []string {
	table, err := sqlident.Qualify(s.cfg.Schema, s.name)
	if err != nil || job != "sweep" && job != "operate" {
		return nil // New has found out a name that cannot be
	}
	read := "SELECT" // a condition of one's own may read anything
	if s.cfg.Where == "" {
		read = "SELECT (" + strings.Join(s.readColumns(), ", ") + ")"
	}
	if job == "operate" {
		return sqlident.Granted(s.cfg.Schema, read+" ON "+table)
	}
	return sqlident.Granted(s.cfg.Schema, read+", UPDATE ("+s.readColumns()[2]+") ON "+table)
}

// readColumns are those that statements read, the status third.
func (s *Store) readColumns() []string {
	names := append([]string{s.cfg.ID, s.cfg.Deadline, s.cfg.Status}, s.cfg.Columns...)
	for i, name := range names {
		names[i], _ = sqlident.Quote(name) // New has checked it
	}
	return names
}
