package migrate

import (
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/internal/pgcall"
)

// Missing explains errors about tables and functions that were never created.
type Missing struct {
	// Call creates the tables, such as "outboxpgx.Migrate".
	Call string
	// Tables are the qualified and quoted names of sqlident, of functions too. The absence of others has other reasons.
	Tables []string
}

// Explain puts Call into the text of an error that says that one of them does not exist, and pgcall.ErrIgnored into
// the error of a statement that has found out that a table ignored its change. It returns every other error, and nil, as it is.
func (m Missing) Explain(err error) error {
	answer, ok := errors.AsType[*pgconn.PgError](err)
	if ok && answer.Code == changeIgnored && !errors.Is(err, pgcall.ErrIgnored) {
		return fmt.Errorf("%w: %w", err, pgcall.ErrIgnored)
	}
	if !ok || answer.Code != undefinedTable && answer.Code != undefinedFunction && answer.Code != undefinedSchema {
		return err
	}
	for _, table := range m.Tables {
		// The message names the schema, too: of another table in it only the schema is the same.
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
	changeIgnored     = "HF001" // a code of ours
)

// AtCommit is txretry.AtCommit, and the error of COMMIT is explained.
func (m Missing) AtCommit(tx pgx.Tx, sql string, args ...any) bool {
	h, ok := tx.(interface {
		AtCommitExplained(explain func(error) error, sql string, args ...any) bool
	})
	return ok && h.AtCommitExplained(m.Explain, sql, args...)
}
