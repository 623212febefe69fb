package expirypgx

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/internal/pgcall"
)

// Overdue lists rows that have been due for at least so long and are still active, the longest overdue
// first: those in quarantine, those that a transaction holds, and those that nobody sweeps. The limit must
// be at least 1. It changes nothing.
func (s *Store) Overdue(ctx context.Context, by time.Duration, limit int) ([]expiry.Row, error) {
	if by < 0 || limit < 1 {
		return nil, errors.New("expirypgx: overdue: by must not be negative, and the limit at least 1")
	}
	var rows []expiry.Row
	err := pgcall.Use(ctx, s.pool, func(ctx context.Context, conn *pgxpool.Conn) error {
		rows = nil
		result, _ := conn.Query(ctx, s.sql.overdue, by.Microseconds(), limit) // ForEachRow returns its error
		var in incoming
		_, err := pgx.ForEachRow(result, in.columns(len(s.cfg.Columns)), func() error {
			rows = append(rows, in.row(s.cfg.Columns))
			return nil
		})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("expirypgx: overdue: %w", s.worded(err))
	}
	return rows, nil
}
