package pgcall

import (
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// ErrIgnored means that Postgres accepted a statement of ours and did not change the row: a trigger, a rule or a
// row-level-security policy of the table dropped the change.
var ErrIgnored = errors.New("a trigger, rule or policy of the table dropped it; Check names it")

// Ignored returns an ErrIgnored that names the table and the change.
func Ignored(table, change string) error {
	return fmt.Errorf("table %s ignored %s: %w", table, change, ErrIgnored)
}

// noRow is what the statements of OneRow and Changed make the server say.
const noRow = "holdfast: no row was stored"

// OneRow returns a statement that runs an INSERT of one row and fails where the table stores none. It is for a
// statement that travels with COMMIT, whose count comes too late to be looked at.
func OneRow(insert string) string {
	return `WITH stored AS (` + insert + ` RETURNING 1)
		SELECT CASE count(*) WHEN 1 THEN 1 ELSE ('` + noRow + `' || count(*))::int END FROM stored`
}

// Changed returns the end of a statement that selects from one of its WITH queries, and fails if another one has changed
// nothing although the first has rows.
func Changed(rows, change string) string {
	return ` SELECT CASE WHEN EXISTS (SELECT FROM ` + change + `) THEN 1 ELSE ('` + noRow + `' || (SELECT count(*) FROM ` + change + `))::int END FROM ` + rows
}

// ExplainOneRow makes an ErrIgnored of the failure of a OneRow or a Changed, and returns every other error as it is.
func ExplainOneRow(table string, err error) error {
	answer, ok := errors.AsType[*pgconn.PgError](err)
	if !ok || answer.Code != "22P02" || !strings.Contains(answer.Message, noRow) {
		return err
	}
	return fmt.Errorf("%w: %w", Ignored(table, "a new row"), err)
}
