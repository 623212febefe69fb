package pgcall

import (
	"errors"
	"fmt"
)

// ErrIgnored means that Postgres accepted a statement of ours and did not change the row: a trigger, a rule or a
// row-level-security policy of the table dropped the change.
var ErrIgnored = errors.New("a trigger, rule or policy of the table dropped it; Check names it")

// Ignored returns an ErrIgnored that names the table and the change.
func Ignored(table, change string) error {
	return fmt.Errorf("table %s ignored %s: %w", table, change, ErrIgnored)
}
