package outboxpgx

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/internal/deadletter"
	"github.com/holdfast-go/holdfast/outbox/internal/stored"
)

// deadLetters implements outbox.DeadLetters.
type deadLetters struct {
	pool *pgxpool.Pool
	t    tables
	sql  deadStatements

	wake func() // a relay, for what was returned

	readTimeout, changeTimeout time.Duration
}

func newDeadLetters(pool *pgxpool.Pool, t tables, wake func()) *deadLetters {
	return &deadLetters{pool: pool, t: t, sql: t.deadStatements(), wake: wake, readTimeout: 10 * time.Second, changeTimeout: time.Minute}
}

// DeadLetters returns the dead letters of the outbox. A read has 10 s, and 10 s more on another
// connection where the server was silent on the first; the choice of what is changed has twice a minute, each step of the
// change one. The error after that is context.DeadlineExceeded. What was changed, by whom and why is kept: see Audit.
func (s *Store) DeadLetters() outbox.DeadLetters { return s.dead }

// listBytes bounds the bodies of one List together.
const listBytes = 32 << 20

// List implements outbox.DeadLetters.
func (d *deadLetters) List(ctx context.Context, f outbox.Filter) ([]outbox.DeadLetter, error) {
	if f.Limit == 0 {
		f.Limit = deadletter.ListLimit
	}
	after, err := parseCursor(f.After)
	if err := errors.Join(err, deadletter.CheckList(f)); err != nil {
		return nil, err
	}
	return collect(ctx, d, "list dead letters", scanDeadLetter, d.sql.list, append(filterArgs(f), listBytes, after.at, after.seq)...)
}

// collect reads the rows of a query for operators, on another connection where the server is silent on
// the first.
func collect[T any](ctx context.Context, d *deadLetters, what string, scan pgx.RowToFunc[T], sql string, args ...any) ([]T, error) {
	var found []T
	err := pgcall.Twice(ctx, d.pool, d.readTimeout, func(ctx context.Context, conn *pgxpool.Conn) error {
		return planned(ctx, conn, beginReadSQL, sql, args, func(q *pgx.QueuedQuery) {
			q.Query(func(rows pgx.Rows) (err error) {
				found, err = pgx.CollectRows(rows, scan)
				return err
			})
		})
	})
	if err != nil {
		return nil, fmt.Errorf("outboxpgx: %s: %w", what, d.t.explain(err))
	}
	return found, nil
}

func scanDeadLetter(row pgx.CollectableRow) (d outbox.DeadLetter, err error) {
	var r record
	var failed pgtype.Timestamptz // infinite, of another program: the zero time
	var seq int64
	if err := row.Scan(r.dest(&d.Class, &d.Error, &failed, &d.Fingerprint, &seq)...); err != nil {
		return d, err
	}
	m, unreadable := r.message()
	d.Message, d.Attempts, d.CreatedAt, d.FailedAt, d.Unreadable = stored.Message(m), m.Attempts, m.CreatedAt, failed.Time, unreadable
	d.Cursor = cursor{failed, seq}.String()
	return d, nil
}

// Show implements outbox.DeadLetters.
func (d *deadLetters) Show(ctx context.Context, id uuid.UUID) (outbox.DeadLetter, error) {
	letters, err := d.List(ctx, outbox.Filter{IDs: []uuid.UUID{id}})
	if err != nil {
		return outbox.DeadLetter{}, err
	}
	if len(letters) == 0 {
		return outbox.DeadLetter{}, outbox.ErrNotFound
	}
	return letters[0], nil
}

// Count implements outbox.DeadLetters.
func (d *deadLetters) Count(ctx context.Context, f outbox.Filter) (n int, err error) {
	if err := deadletter.CheckFilter(f); err != nil {
		return 0, err
	}
	err = pgcall.Twice(ctx, d.pool, d.readTimeout, func(ctx context.Context, conn *pgxpool.Conn) error {
		return conn.QueryRow(ctx, d.sql.count, filterArgs(f)...).Scan(&n)
	})
	if err != nil {
		return 0, fmt.Errorf("outboxpgx: count dead letters: %w", d.t.explain(err))
	}
	return n, nil
}

// filterArgs are the arguments of deadWhere.
func filterArgs(f outbox.Filter) []any {
	var ids uuids // nil: any
	if f.IDs != nil {
		ids = make(uuids, len(f.IDs))
	}
	for i, id := range f.IDs {
		ids[i] = pgtype.UUID{Bytes: id, Valid: true}
	}
	return []any{
		ids, nullable(f.Class), nullable(f.Name), nullable(f.Key), optional(f.FailedAfter), optional(f.FailedBefore),
		optional(f.Limit), nullable(f.ErrorContains), nullable(f.Fingerprint),
	}
}

// optional is nil for the zero value.
func optional[T comparable](v T) *T {
	if v == *new(T) {
		return nil
	}
	return &v
}
