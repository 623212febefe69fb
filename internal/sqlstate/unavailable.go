package sqlstate

import (
	"errors"
	"reflect"
	"slices"
)

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
