package sqlstate

import "slices"

// passing are the classes of errors that have nothing to do with what a statement changes: states of the transaction,
// conflicts, locks, and operators.
var passing = []string{"25", "40", "55", "57"}

// Refused reports whether the server has refused a statement for what it changes. Of a statement that changes several rows
// one row may be at fault, and the others may be accepted without it.
func Refused(err error) bool {
	code := Of(err)
	return len(code) == 5 && !slices.Contains(passing, code[:2]) && !Unavailable(err)
}
