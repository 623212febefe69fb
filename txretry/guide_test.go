package txretry_test

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/txretry"
)

// The code of README.md, so that it is compiled.

var _ = []any{guideTransfer}

type account struct{ from, to string }

func guideTransfer(ctx context.Context, manager *txretry.Manager, a account, cents int) error {
	return manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
		var balance int
		if err := tx.QueryRow(ctx, "SELECT cents FROM accounts WHERE id = $1", a.from).Scan(&balance); err != nil {
			return err
		}
		if balance < cents {
			return errPoor // rolled back, and returned as it is
		}
		if _, err := tx.Exec(ctx, "UPDATE accounts SET cents = cents - $2 WHERE id = $1", a.from, cents); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, "UPDATE accounts SET cents = cents + $2 WHERE id = $1", a.to, cents)
		return err
	})
}

var errPoor = errors.New("not enough money")
