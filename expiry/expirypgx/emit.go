package expirypgx

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/expiry"
)

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
