package main_test

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// pgxScan asks the test's schema for one row.
func pgxScan(ctx context.Context, s services, target any, sql string, args ...any) error {
	conn, err := pgx.Connect(ctx, s.databaseURL)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	return conn.QueryRow(ctx, sql, args...).Scan(target)
}
