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

// DeleteSQL deletes rows and skips those that are locked. The limit is the parameter after Args.
func (s Statement) DeleteSQL() string {
	also := ""
	if s.Also != "" {
		also = " AND (" + s.Also + ") IS TRUE" // no index serves that, so the rows are looked up by their ID
	}
	return fmt.Sprintf(`DELETE FROM %[1]s WHERE %[2]s = ANY(ARRAY(SELECT %[2]s FROM %[1]s WHERE %[3]s LIMIT $%[4]d FOR UPDATE SKIP LOCKED))`,
		s.Table, s.ID, s.Due, len(s.Args)+1) + also
}

// countSQL counts them, locked or not. Behind Args comes the limit.
func (s Statement) countSQL() string {
	return fmt.Sprintf(`SELECT count(*) FROM (SELECT FROM %s WHERE %s LIMIT $%d) due`, s.Table, s.Due, len(s.Args)+1)
}

func (s Statement) args(limit int) []any { return append(slices.Clone(s.Args), limit) }
