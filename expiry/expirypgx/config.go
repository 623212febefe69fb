package expirypgx

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/internal/sqlident"
)

// Config describes the table. Only Table is required.
type Config struct {
	// Schema of the table. Empty means that the search path decides.
	Schema string
	// Table whose rows expire.
	Table string

	// ID, Deadline and Status are columns: the primary key (uuid, text or an
	// integer), a timestamptz and the state. Empty means "id", "expires_at" and
	// "status".
	ID, Deadline, Status string

	// Active is the status of rows that can expire, Expired the one they get.
	// Empty means "held" and "expired". The column may be text or an enum.
	Active, Expired string

	// Columns are further columns to read; expiry.Row.Values carries them as text.
	Columns []string

	// Where is a condition in SQL that rows must meet besides, such as
	// "deleted_at IS NULL". It goes into every statement as it stands, so it must
	// come from your code, never from outside. It must not fail for any row: one
	// that does stops all.
	Where string

	// Claim is a query of your own that chooses due rows, for an order or a
	// share-out that the generated one does not know. $1 is how many at most, $2
	// the ids to leave alone:
	//
	//	SELECT id FROM holds
	//	WHERE status = 'held' AND expires_at <= now() AND id <> ALL($2)
	//	ORDER BY price DESC LIMIT $1
	//
	// It has one column, the id, and Check has the server read it before the first
	// sweep. It need not lock: the generated statement does that with the rows it names,
	// and passes over those that are not due. Where many sweepers or long
	// transactions compete, end it in FOR UPDATE SKIP LOCKED, or it may name again
	// and again rows that others hold. It costs one more trip per batch. It
	// must come from your code, never from outside. Empty means generated.
	Claim string

	// Emit is called in the transaction of the batch with the rows that were just
	// expired, longest overdue first: write to the outbox here, in one call for all
	// of them; Messages makes such a function. An error rolls the batch back;
	// *expiry.RowError names the row at fault. It may be called again for the same
	// rows, so it must have no effect but through tx. A panic counts as an error.
	// Nil only changes the state.
	Emit func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error

	// Each is Emit for one row after the other. Whose call fails is at fault. At
	// most one of the two is set.
	Each func(ctx context.Context, tx pgx.Tx, row expiry.Row) error

	// Isolation of the transactions. Empty means pgx.ReadCommitted.
	Isolation pgx.TxIsoLevel
}

func (c Config) withDefaults() Config {
	c.ID = cmp.Or(c.ID, "id")
	c.Deadline = cmp.Or(c.Deadline, "expires_at")
	c.Status = cmp.Or(c.Status, "status")
	c.Active = cmp.Or(c.Active, "held")
	c.Expired = cmp.Or(c.Expired, "expired")
	c.Isolation = cmp.Or(c.Isolation, pgx.ReadCommitted)
	c.Columns = slices.Clone(c.Columns)
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
	name("Table", c.Table, false)
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
	if c.Emit != nil && c.Each != nil {
		errs = append(errs, errors.New("expirypgx: Config.Emit and Config.Each are both set"))
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
