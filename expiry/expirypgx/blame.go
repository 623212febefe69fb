package expirypgx

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/txretry"
)

// attempt is what is known of the attempt that ended the transaction.
type attempt struct {
	ids   []string // of the claimed rows
	batch expiry.Batch
	own   error // a callback's or errNotChanged, on a connection that still works
}

// failure is err with the rows one of which may have caused it: the one that a
// callback names, else all that were claimed. They are suspected whatever it was,
// since the others then need not wait for them.
func (a attempt) failure(ctx context.Context, err error) error {
	if len(a.ids) == 0 {
		return fmt.Errorf("expirypgx: sweep: %w", err)
	}
	failed := &expiry.BatchError{Rows: a.ids, Last: a.batch.Last, Err: err}
	if ctx.Err() != nil { // too slow: any row may be, whatever it came to
		return failed
	}
	failed.Doubtful = !a.blames(err)
	if named := a.named(err); named != "" {
		failed.Rows = []string{named}
	}
	return failed
}

// named is the row that a callback names, unless an earlier call may have hidden
// an error of its own, or it was no row's fault.
func (a attempt) named(err error) string {
	var row *expiry.RowError
	var pg *pgconn.PgError
	if !errors.As(a.own, &row) || !slices.Contains(a.ids, row.ID) || !a.blames(err) {
		return ""
	}
	if errors.As(err, &pg) && pg.Code == pgTransactionFailed {
		return ""
	}
	return row.ID
}

// blames reports whether one of the claimed rows may have caused err: any error
// of a callback's own or of its statements, bad data, a constraint, a trigger, a
// lock that somebody holds, but not what would hit any row.
func (a attempt) blames(err error) bool {
	var locked *txretry.LockTimeoutError
	var unknown *txretry.CommitUnknownError
	var pg *pgconn.PgError
	switch {
	case len(a.ids) == 0 || errors.As(err, &unknown):
		return false
	case errors.As(err, &locked):
		return true
	case !errors.As(err, &pg):
		return a.own != nil && errors.Is(err, a.own)
	case pg.Code == pgStatementTimeout || pg.Code == pgTransactionFailed:
		return true
	}
	return !slices.Contains(noRowsFault, pg.Code[:min(2, len(pg.Code))])
}

const (
	pgStatementTimeout  = "57014"
	pgTransactionFailed = "25P02" // a callback went on after a statement that failed
)

// noRowsFault are the SQLSTATE classes of connections, features, the state of
// the transaction, authorization, catalogs, conflicts, schema and permissions,
// resources, locks, shutdown and the server's own faults. Everything else,
// states that triggers make up included, may come from a row: to suspect one
// wrongly delays it, to overlook it stops all the others.
var noRowsFault = []string{"08", "0A", "25", "26", "28", "34", "3B", "3D", "3F", "40", "42", "53", "55", "57", "58", "F0", "XX"}
