// Package sqlstate classifies the error codes of Postgres. It works with pgx and lib/pq, because the errors of both have
// the method SQLState.
package sqlstate

import (
	"errors"
	"reflect"
	"slices"
)

// Reporter is an error with a SQLSTATE.
type Reporter interface{ SQLState() string }

// Of returns the first SQLSTATE in err's tree, or "" if there is none.
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

// RefusesWrites reports whether the server accepts no writes at present. It may still answer queries.
func RefusesWrites(err error) bool {
	switch Of(err) {
	case "25006", // read-only: a standby, or a host that ran out of disk
		"53100", // disk full
		"58030": // the disk failed
		return true
	case "54000": // the limit of transaction ids affects every write; the limit of an index row only one
		return slices.Contains([]string{"GetNewTransactionId", "GetNewMultiXactId"}, routine(err))
	}
	return false
}

// Unavailable reports whether the server cannot do any work at present: it rejects writes, the connection failed (class
// 08), resources ran out (53), or it is starting or shutting down (57P). This is the only list of such codes.
func Unavailable(err error) bool {
	code := Of(err)
	return len(code) == 5 && (code[:2] == "08" || code[:2] == "53" || code[:3] == "57P") || RefusesWrites(err)
}

// routine returns the server function that reported the error. The errors of both clients have a field for it. Unlike the
// message, it is not translated.
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

// passing lists codes of errors that are independent of the rows that a statement changes. For one row, a trigger may
// raise any other code of their classes. The codes of Unavailable are independent of rows, too.
var passing = []string{
	"25P02", // the transaction failed earlier
	"25P03", // a timeout ended the session
	"25P04",
	"40001", // serialization failure
	"40P01", // deadlock
	"55006", // object in use
	"55P03", // lock not available
	"57014", // query canceled
}

// Refused reports whether the server rejected a statement because of its data. If the statement changes several rows, one
// row may be at fault and the others may be acceptable without it.
func Refused(err error) bool {
	code := Of(err)
	return len(code) == 5 && !slices.Contains(passing, code) && !Unavailable(err)
}
