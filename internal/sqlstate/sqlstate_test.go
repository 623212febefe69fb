package sqlstate_test

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/internal/sqlstate"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

type foreign struct{}

func (foreign) Error() string    { return "of another client" }
func (foreign) SQLState() string { return "40001" }

func TestOf(t *testing.T) {
	t.Parallel()
	for want, err := range map[string]error{
		"":      errors.New("no answer"),
		"23505": fmt.Errorf("wrapped: %w", &pgconn.PgError{Code: "23505"}),
		"40001": errors.Join(errors.New("other"), fmt.Errorf("wrapped: %w", foreign{})),
	} {
		if got := sqlstate.Of(err); got != want {
			t.Errorf("%v has %q, want %q", err, got, want)
		}
	}
	if got := sqlstate.Of(nil); got != "" {
		t.Errorf("nil has %q", got)
	}
}

// otherClient is an error like those of lib/pq, with fields of the same names.
type otherClient struct{ Code, Routine string }

func (e *otherClient) Error() string    { return e.Code }
func (e *otherClient) SQLState() string { return e.Code }

func TestUnavailable(t *testing.T) {
	t.Parallel()
	const xid = "GetNewTransactionId"
	for _, tc := range []struct {
		err                        error
		unavailable, refusesWrites bool
	}{
		{&pgconn.PgError{Code: "08006"}, true, false},
		{&pgconn.PgError{Code: "53300"}, true, false},
		{&pgconn.PgError{Code: "57P03"}, true, false},
		{&pgconn.PgError{Code: "25006"}, true, true},
		{&pgconn.PgError{Code: "53100"}, true, true},
		{&pgconn.PgError{Code: "58030"}, true, true},
		{fmt.Errorf("wrapped: %w", &pgconn.PgError{Code: "54000", Routine: xid}), true, true},
		{&pgconn.PgError{Code: "54000", Routine: "GetNewMultiXactId"}, true, true},
		{&otherClient{"54000", xid}, true, true},
		{&otherClient{"54000", "index_form_tuple_context"}, false, false},
		{&pgconn.PgError{Code: "54000"}, false, false},
		{&pgconn.PgError{Code: "57014"}, false, false},
		{&pgconn.PgError{Code: "23505"}, false, false},
		{foreign{}, false, false},
		{errors.New("no answer"), false, false},
		{nil, false, false},
	} {
		if got := sqlstate.Unavailable(tc.err); got != tc.unavailable {
			t.Errorf("%v: unavailable %v", tc.err, got)
		}
		if got := sqlstate.RefusesWrites(tc.err); got != tc.refusesWrites {
			t.Errorf("%v: refuses writes %v", tc.err, got)
		}
	}
}

func TestRefused(t *testing.T) {
	t.Parallel()
	for want, codes := range map[bool][]string{
		true:  {"P0001", "P0004", "22001", "23503", "25001", "40002", "42501", "42P01", "54000", "55000", "55P02", "57000", "HF001", "XX002"},
		false: {"", "08006", "25006", "25P02", "25P03", "25P04", "40001", "40P01", "53100", "55006", "55P03", "57014", "57P01", "57P05", "58030"},
	} {
		for _, code := range codes {
			if got := sqlstate.Refused(&pgconn.PgError{Code: code}); got != want {
				t.Errorf("%q: refused %v, want %v", code, got, want)
			}
		}
	}
	if sqlstate.Refused(&pgconn.PgError{Code: "54000", Routine: "GetNewTransactionId"}) || sqlstate.Refused(nil) {
		t.Error("an error of every statement counts as refused")
	}
}
