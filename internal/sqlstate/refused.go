package sqlstate

import "slices"

// passing are the codes of errors that have nothing to do with the rows that a statement changes. A trigger may raise any
// other code of their classes for one row. Those of Unavailable pass, too.
var passing = []string{
	"25P02", // the transaction has failed before
	"25P03", // a timeout ended the session
	"25P04",
	"40001", // serialization failure
	"40P01", // deadlock
	"55006", // object in use
	"55P03", // lock not available
	"57014", // query canceled
}

// Refused reports whether the server has refused a statement for what it changes. Of a statement that changes several rows
// one row may be at fault, and the others may be accepted without it.
func Refused(err error) bool {
	code := Of(err)
	return len(code) == 5 && !slices.Contains(passing, code) && !Unavailable(err)
}
