package postgres

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// DeadChange is one change of the consumer's dead letters by an operator.
type DeadChange struct {
	At     time.Time
	Action string
	// Count is how many were changed, nil if that is not known: the command did not come to its end.
	Count      *int
	By, Reason string
	// Chosen says which.
	Chosen string
}

const beginDeadChangeSQL = `
with old as (delete from dead_changes where at < now() - interval '1 year')
insert into dead_changes (action, changed_by, reason, chosen) values ($1, $2, $3, $4) returning id`

const finishDeadChangeSQL = `
with nothing as (delete from dead_changes where id = $1 and $2 = 0)
update dead_changes set count = $2 where id = $1 and $2 > 0`

// RecordDeadChange keeps for a year who changed what and why. It writes that down, lets change do it, and adds how
// many were changed; what changed nothing is not kept.
func RecordDeadChange(ctx context.Context, pool *pgxpool.Pool, c DeadChange, change func() (int, error)) (int, error) {
	var id int64
	if err := pool.QueryRow(ctx, beginDeadChangeSQL, c.Action, c.By, c.Reason, c.Chosen).Scan(&id); err != nil {
		return 0, err
	}
	n, err := change()
	if err != nil && n == 0 {
		return 0, err // some may have been changed all the same
	}
	if _, failed := pool.Exec(ctx, finishDeadChangeSQL, id, n); err == nil {
		err = failed
	}
	return n, err
}

// DeadChanges returns the newest changes, the newest first.
func DeadChanges(ctx context.Context, pool *pgxpool.Pool, limit int) ([]DeadChange, error) {
	rows, err := pool.Query(ctx, "select at, action, count, changed_by, reason, chosen from dead_changes order by id desc limit $1", limit)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[DeadChange])
}
