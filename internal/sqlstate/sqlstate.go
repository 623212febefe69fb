// Package sqlstate finds what Postgres said, whichever client has told it: pgx's errors and lib/pq's
// both have the method SQLState.
package sqlstate

import (
	"errors"
	"reflect"
	"slices"
)

// Reporter is an error with the code of the server.
type Reporter interface{ SQLState() string }

// Of returns the first SQLSTATE in err's tree, or "" if the server has said nothing.
func Of(err error) string {
	var answer interface {
		error
		Reporter
	}
	if errors.As(err, &answer) {
		return answer.SQLState()
	}
	return ""
}

// RefusesWrites reports whether the server says that it takes no writes at present, whatever they are. It
// may still answer questions.
func RefusesWrites(err error) bool {
	switch Of(err) {
	case "25006", // read-only: a standby, or what a host sets when a disk is full
		"53100", // disk full
		"58030": // the disk failed
		return true
	case "54000": // a limit: that of transaction ids concerns every write, that of an index row one of them
		return slices.Contains([]string{"GetNewTransactionId", "GetNewMultiXactId"}, routine(err))
	}
	return false
}

// Unavailable reports whether the server says that it cannot do its work at present, whatever the work is:
// it refuses writes, or the connection failed (class 08), resources ran out (53), or it shuts down or starts (57P).
// This is the only list of such codes.
func Unavailable(err error) bool {
	code := Of(err)
	return len(code) == 5 && (code[:2] == "08" || code[:2] == "53" || code[:3] == "57P") || RefusesWrites(err)
}

// routine returns the name of the server's function that reported the error. Both clients' errors have a field
// for it. Unlike the message it is in no language.
func routine(err error) string {
	var answer interface {
		error
		Reporter
	}
	if !errors.As(err, &answer) {
		return ""
	}
	v := reflect.Indirect(reflect.ValueOf(answer))
	if v.Kind() != reflect.Struct {
		return ""
	}
	if field := v.FieldByName("Routine"); field.Kind() == reflect.String {
		return field.String()
	}
	return ""
}

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
