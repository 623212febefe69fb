package txretrytest

import (
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgconn"
)

// Fault makes one attempt fail. The zero Fault lets it succeed.
type Fault struct {
	Point    Point
	SQLSTATE string // what the server answers, such as "40001"; none for a lost reply
}

// Point is the place where an attempt fails.
type Point int

// The places where an attempt can fail.
const (
	NoFault Point = iota

	AtBegin  // the transaction does not begin
	AtEnd    // fn has succeeded, then fails as if by its last statement
	AtCommit // COMMIT is refused; nothing is applied

	ReplyLostApplied    // COMMIT is applied, its reply does not arrive
	ReplyLostNotApplied // COMMIT is not applied, and no reply arrives
)

var errReplyLost = errors.New("txretrytest: connection lost during COMMIT")

func checkScript(script []Fault) error {
	var errs []error
	for i, f := range script {
		if f.Point < NoFault || f.Point > ReplyLostNotApplied {
			errs = append(errs, fmt.Errorf("txretrytest: Config.Script[%d]: unknown point %d", i, f.Point))
			continue
		}
		answers := f.Point == AtBegin || f.Point == AtEnd || f.Point == AtCommit
		if answers != (len(f.SQLSTATE) == 5) || (!answers && f.SQLSTATE != "") {
			errs = append(errs, fmt.Errorf("txretrytest: Config.Script[%d]: SQLSTATE %q does not fit its point", i, f.SQLSTATE))
		}
	}
	return errors.Join(errs...)
}

func answer(sqlstate, text string) error {
	return &pgconn.PgError{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: sqlstate, Message: text}
}
