package pgprune

import (
	"fmt"
	"slices"
)

// Statement says which rows of a table are due.
type Statement struct {
	// Table is qualified and quoted.
	Table string
	// ID is a column that tells rows apart: a key, or ctid, which does so in one partition only.
	ID string
	// Also is a condition, met by all that is due, of rows whose ID is that of a row that is due. ctid needs it, since a
	// table may be partitioned. "" means none.
	Also string
	// Due is a condition, by an index, and the order in which that has the rows: what follows WHERE.
	Due string
	// Args are the parameters of Due.
	Args []any
}

// DeleteSQL deletes rows and skips those that are locked. It returns how many it has chosen, and how many it has deleted:
// fewer, where a trigger or a policy of the table drops the change. The parameters after Args are the limit, and how many rows
// to leave out at the beginning.
func (s Statement) DeleteSQL() string {
	also := ""
	if s.Also != "" {
		also = " AND (" + s.Also + ") IS TRUE" // no index serves that, so the rows are looked up by their ID
	}
	return fmt.Sprintf(`WITH due AS MATERIALIZED (SELECT %[2]s AS id FROM %[1]s WHERE %[3]s LIMIT $%[4]d OFFSET $%[5]d FOR UPDATE SKIP LOCKED),
gone AS (DELETE FROM %[1]s WHERE %[2]s = ANY(ARRAY(SELECT id FROM due))`, s.Table, s.ID, s.Due, len(s.Args)+1, len(s.Args)+2) + also + ` RETURNING 1)
SELECT (SELECT count(*) FROM due), (SELECT count(*) FROM gone)`
}

// nameSQL returns the ID of a row, for people. Behind Args comes how many rows are before it.
func (s Statement) nameSQL() string {
	return fmt.Sprintf(`SELECT %s::text FROM %s WHERE %s LIMIT 1 OFFSET $%d`, s.ID, s.Table, s.Due, len(s.Args)+1)
}

// countSQL counts them, locked or not. Behind Args comes the limit.
func (s Statement) countSQL() string {
	return fmt.Sprintf(`SELECT count(*) FROM (SELECT FROM %s WHERE %s LIMIT $%d) due`, s.Table, s.Due, len(s.Args)+1)
}

func (s Statement) args(more ...any) []any { return append(slices.Clone(s.Args), more...) }
