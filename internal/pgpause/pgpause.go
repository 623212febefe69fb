// Package pgpause stores in Postgres which parts are paused, by whom and why. A part without a row is running.
package pgpause

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/actor"
	"github.com/holdfast-go/holdfast/internal/migrate"
	"github.com/holdfast-go/holdfast/internal/pgcall"
)

// timeout bounds each try of a read. A read without an answer is retried on another connection.
const timeout = 4 * time.Second

// Switch is the pause of one part. It is safe for concurrent use.
type Switch struct {
	Pool *pgxpool.Pool
	// Table is the quoted name of the table, and Part selects the row.
	Table, Part string
	Missing     migrate.Missing
}

// Set pauses the part. A part that is already paused keeps its start time.
func (s Switch) Set(ctx context.Context, by, reason string) error {
	if err := actor.Check("by", "reason", by, reason); err != nil {
		return err
	}
	n, err := pgcall.Exec(ctx, s.Pool, `INSERT INTO `+s.Table+` (part, actor, reason) VALUES ($1, $2, $3)
		ON CONFLICT (part) DO UPDATE SET actor = excluded.actor, reason = excluded.reason`, s.Part, by, reason)
	if err == nil && n == 0 {
		return s.ignored()
	}
	return s.Missing.Explain(err)
}

// Clear ends the pause, if there is one.
func (s Switch) Clear(ctx context.Context) error {
	ignored, err := pgcall.Changes(func() (int64, error) {
		n, err := pgcall.Exec(ctx, s.Pool, `DELETE FROM `+s.Table+` WHERE part = $1`, s.Part)
		return n, s.Missing.Explain(err)
	}, func() (bool, error) {
		left, err := s.Get(ctx)
		return left != (actor.Pause{}), err
	})
	if ignored {
		return s.ignored()
	}
	return err
}

func (s Switch) ignored() error {
	return pgcall.Ignored(s.Table, fmt.Sprintf("the change of the pause of %q", s.Part))
}

// Get returns the pause. Its time comes from the database's clock.
func (s Switch) Get(ctx context.Context) (state actor.Pause, err error) {
	err = pgcall.Twice(ctx, s.Pool, timeout, func(ctx context.Context, conn *pgxpool.Conn) error {
		state = actor.Pause{}
		err := conn.QueryRow(ctx, `SELECT actor, reason, since FROM `+s.Table+` WHERE part = $1`, s.Part).Scan(&state.By, &state.Reason, &state.Since)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil
		}
		return err
	})
	return state, s.Missing.Explain(err)
}
