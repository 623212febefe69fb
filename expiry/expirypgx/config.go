package expirypgx

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/internal/sqlident"
)

// Config describes the table. The zero value works for a table with the columns id,
// expires_at and status, whose rows go from held to expired.
type Config struct {
	// Schema of the table. Default: the search path decides.
	Schema string

	// ID, Deadline and Status are columns: the primary key (uuid, text or an
	// integer), a timestamptz and the state. Default: "id", "expires_at" and
	// "status".
	ID, Deadline, Status string

	// Active is the status of rows that can expire, Expired the one they get.
	// The column may be text or an enum. Default: "held" and "expired".
	Active, Expired string

	// Columns are further columns to read; expiry.Row.Values carries them as text.
	// Optional.
	Columns []string

	// Where is a further condition in SQL that rows must meet, such as
	// "deleted_at IS NULL". It goes into every statement as it stands, so it must
	// come from your code, never from outside. It must not fail for any row: one
	// that does stops all. Optional.
	Where string

	// Emit is called in the transaction of the batch with the rows that were just
	// expired, longest overdue first: write to the outbox here, in one call for all
	// of them; Messages makes such a function. An error rolls the batch back;
	// *expiry.RowError names the row at fault. Emit may be called again for the same
	// rows, so it must have no effect but through tx. A panic counts as an error.
	// Default: only the state changes.
	Emit func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error

	// Isolation of the transactions. Default: pgx.ReadCommitted.
	Isolation pgx.TxIsoLevel

	// PollOnly has the Store neither send nor listen to notifications, for a pool
	// behind a pooler in transaction mode. Sweepers then find rows that other
	// processes made when they look, every expiry.SweeperConfig.PollInterval.
	PollOnly bool

	Logger *slog.Logger // Default: slog.Default().
}

func (c Config) withDefaults() Config {
	c.ID = cmp.Or(c.ID, "id")
	c.Deadline = cmp.Or(c.Deadline, "expires_at")
	c.Status = cmp.Or(c.Status, "status")
	c.Active = cmp.Or(c.Active, "held")
	c.Expired = cmp.Or(c.Expired, "expired")
	c.Isolation = cmp.Or(c.Isolation, pgx.ReadCommitted)
	c.Columns = slices.Clone(c.Columns)
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

func (c Config) validate() error {
	var errs []error
	column := map[string]string{}
	name := func(field, value string, unique bool) {
		if err := sqlident.Check(value); err != nil {
			errs = append(errs, fmt.Errorf("expirypgx: Config.%s: %w", field, err))
		}
		if other, taken := column[value]; unique && taken {
			errs = append(errs, fmt.Errorf("expirypgx: Config.%s and Config.%s are the same column %q", other, field, value))
		}
		if unique {
			column[value] = field
		}
	}
	if c.Schema != "" {
		name("Schema", c.Schema, false)
	}
	name("ID", c.ID, true)
	name("Deadline", c.Deadline, true)
	name("Status", c.Status, true)
	for i, col := range c.Columns {
		name(fmt.Sprintf("Columns[%d]", i), col, false)
	}
	_, activeErr := literal(c.Active)
	_, expiredErr := literal(c.Expired)
	if activeErr != nil {
		errs = append(errs, fmt.Errorf("expirypgx: Config.Active: %w", activeErr))
	}
	if expiredErr != nil {
		errs = append(errs, fmt.Errorf("expirypgx: Config.Expired: %w", expiredErr))
	}
	if c.Active == c.Expired {
		errs = append(errs, fmt.Errorf("expirypgx: Config.Active and Config.Expired are both %q", c.Active))
	}
	switch c.Isolation {
	case pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable:
	default:
		errs = append(errs, fmt.Errorf("expirypgx: Config.Isolation: %q is not supported", c.Isolation))
	}
	return errors.Join(errs...)
}

// maxLiteral is more than any sensible name of a state.
const maxLiteral = 63

// literal quotes a status. It stands in the statement rather than in a parameter
// so that the planner can use an index restricted to it.
func literal(s string) (string, error) {
	if s == "" || len(s) > maxLiteral {
		return "", fmt.Errorf("status of %d characters, want 1 to %d", len(s), maxLiteral)
	}
	for _, r := range s {
		if r < ' ' || r == '\\' || r == 0x7f || r == 0xfffd {
			return "", fmt.Errorf("status %q: control characters and backslashes are not allowed", s)
		}
	}
	return "'" + strings.ReplaceAll(s, "'", "''") + "'", nil
}

// Messages returns a function for Config.Emit that makes a message of every row
// and writes them in one call. write is the Write method of an outbox's store. A
// row whose message cannot be made is the one at fault.
func Messages[M any](
	write func(ctx context.Context, tx pgx.Tx, messages ...M) error,
	message func(row expiry.Row) (M, error),
) func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error {
	return func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error {
		messages := make([]M, len(rows))
		for i, row := range rows {
			err := guarded("the message of a row", func() (err error) {
				messages[i], err = message(row)
				return err
			})
			if err != nil {
				return &expiry.RowError{ID: row.ID, Err: err}
			}
		}
		return write(ctx, tx, messages...)
	}
}

// guarded turns a panic of a callback into an error.
func guarded(what string, call func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("expirypgx: panic in %s: %v", what, p)
		}
	}()
	return call()
}
