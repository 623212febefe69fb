package txretrytest

import (
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// Fault makes one attempt fail. The zero Fault lets it succeed.
type Fault struct {
	Point     Point
	Statement int    // AtStatement only: which one of the attempt, from 1
	SQLSTATE  string // what the server answers, such as "40001"; none for a lost reply
}

// Point is the place where an attempt fails.
type Point int

// The places where an attempt can fail.
const (
	noFault Point = iota

	AtBegin     // the transaction does not begin
	AtStatement // the n-th Effect or Fail is not run
	AtEnd       // fn has succeeded, then fails as if by its last statement; not that of a nested call
	AtCommit    // COMMIT is refused; nothing is applied, but of 08xxx, 40003 and 57P0x that is unknown

	ReplyLostApplied    // COMMIT is applied, unless a statement of it fails; its reply does not arrive
	ReplyLostNotApplied // COMMIT is not applied, and no reply arrives
)

var (
	errReplyLost = errors.New("txretrytest: connection lost during COMMIT")
	errClosed    = errors.New("txretrytest: connection closed")
)

const scripted = "scripted by txretrytest"

func checkScript(script []Fault) error {
	var errs []error
	for i, f := range script {
		if err := f.check(); err != nil {
			errs = append(errs, fmt.Errorf("txretrytest: Config.Script[%d]: %w", i, err))
		}
	}
	return errors.Join(errs...)
}

func (f Fault) check() error {
	if f.Point < noFault || f.Point > ReplyLostNotApplied {
		return fmt.Errorf("unknown Point %d", f.Point)
	}
	if answers := f.Point >= AtBegin && f.Point <= AtCommit; answers != (len(f.SQLSTATE) == 5) || (!answers && f.SQLSTATE != "") {
		return fmt.Errorf("SQLSTATE %q does not fit its Point", f.SQLSTATE)
	}
	if (f.Point == AtStatement) != (f.Statement > 0) || f.Statement < 0 {
		return fmt.Errorf("a Statement of %d does not fit its Point", f.Statement)
	}
	return nil
}

// answer is what a server says, which closes the connection when it shuts down (57P0x).
func answer(sqlstate, text string) *pgconn.PgError {
	severity := "ERROR"
	if strings.HasPrefix(sqlstate, "57P0") {
		severity = "FATAL"
	}
	return &pgconn.PgError{Severity: severity, SeverityUnlocalized: severity, Code: sqlstate, Message: text}
}
