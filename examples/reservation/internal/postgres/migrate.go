package postgres

import (
	"context"
	"embed"
	"fmt"
	"io/fs"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

//go:embed migrations/*.sql
var migrations embed.FS

// migrationTimeout bounds a Migrate, the wait for that of others included.
const migrationTimeout = 5 * time.Minute

// migrationLock is an arbitrary number that only the shop's migrations use.
const migrationLock = 7_204_118_331

// Migrate creates the shop's tables, or brings them up to date. Several
// processes may do so at once: one works, the others wait and find it done. It
// ends within five minutes.
func Migrate(ctx context.Context, pool *pgxpool.Pool) error {
	ctx, cancel := context.WithTimeout(ctx, migrationTimeout)
	defer cancel()
	files, err := fs.Glob(migrations, "migrations/*.sql") // in the order of their numbers
	if err != nil {
		return err
	}
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		// The lock must not outlive a connection that falls silent.
		if _, err := tx.Exec(ctx, "select set_config('idle_in_transaction_session_timeout', '5s', true)"); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, "select pg_advisory_xact_lock($1)", migrationLock); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, "create table if not exists shop_migrations (file text primary key)"); err != nil {
			return err
		}
		for _, file := range files {
			if err := applyOnce(ctx, tx, file); err != nil {
				return fmt.Errorf("%s: %w", file, err)
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("postgres: migrate: %w", err)
	}
	return nil
}

func applyOnce(ctx context.Context, tx pgx.Tx, file string) error {
	tag, err := tx.Exec(ctx, "insert into shop_migrations values ($1) on conflict do nothing", file)
	if err != nil || tag.RowsAffected() == 0 {
		return err
	}
	sql, err := migrations.ReadFile(file)
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, string(sql))
	return err
}
