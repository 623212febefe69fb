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

// Overdue lists the active rows that have been due for at least the duration by, which may be 0, the
// longest overdue first. Such rows are in quarantine, a transaction holds them, or nobody sweeps them. The
// limit is at least 1. Overdue changes nothing.
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
