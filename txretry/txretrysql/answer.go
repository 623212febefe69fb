package txretrysql

import (
	"errors"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/internal/sqlstate"
)

// serverError is an answer of the server that another driver than pgx's has told. In its tree is also the
// error that pgx would have made of it.
type serverError struct {
	err    error
	answer *pgconn.PgError
}

func (e *serverError) Error() string   { return e.err.Error() }
func (e *serverError) Unwrap() []error { return []error{e.err, e.answer} }

// answerOf makes an error one of pgx's, for what stands on a pgx.Tx. An answer after which the connection
// is closed is FATAL.
func answerOf(err error, closed bool) error {
	code := sqlstate.Of(err)
	if code == "" {
		return err
	}
	if _, ok := errors.AsType[*pgconn.PgError](err); ok {
		return err
	}
	severity := "ERROR"
	if closed {
		severity = "FATAL"
	}
	return &serverError{err, &pgconn.PgError{Severity: severity, SeverityUnlocalized: severity, Code: code, Message: err.Error()}}
}
