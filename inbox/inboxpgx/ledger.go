package inboxpgx

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox"
	inboxdriver "github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/migrate"
	"github.com/holdfast-go/holdfast/internal/pgcall"
)

// ledgerTimeout bounds each call. Whoever repeats it gets another connection.
const ledgerTimeout = 4 * time.Second

// ledger is the driver.Ledger of one consumer in Postgres. It uses connections of its own; a call
// takes 4 seconds at most. It is safe for concurrent use.
type ledger struct {
	pool     *pgxpool.Pool
	consumer string
	table    string
	missing  migrate.Missing

	look, start, end, pass, forget string
}

func newLedger(pool *pgxpool.Pool, names tables, consumer string) *ledger {
	name := names.attempts
	// newest keeps the pair of replays and attempt from going back.
	const newest = `replays = greatest(a.replays, excluded.replays), updated_at = now(),
		attempt = CASE WHEN (a.replays, a.attempt) < (excluded.replays, excluded.attempt) THEN excluded.attempt ELSE a.attempt END,
		due_at = CASE WHEN (a.replays, a.attempt) <= (excluded.replays, excluded.attempt) THEN excluded.due_at ELSE a.due_at END`
	const key = ` WHERE consumer = $1 AND message_id = $2`
	upsert := `INSERT INTO ` + name + ` AS a (consumer, message_id, replays, attempt, open, name, due_at) VALUES ($1, $2, $3, $4, $5, $6, now() + $7::interval)
		ON CONFLICT (consumer, message_id) DO UPDATE SET `
	return &ledger{
		pool: pool, consumer: consumer, table: name, missing: names.missing(),
		look:   `SELECT replays, attempt, open, greatest(extract(epoch FROM now() - due_at) * 1000, 0)::bigint FROM ` + name + key,
		start:  upsert + newest + `, open = CASE WHEN a.replays < excluded.replays THEN 1 ELSE a.open + 1 END`,
		end:    `UPDATE ` + name + ` SET open = 0, updated_at = now()` + key,
		pass:   upsert + newest + `, open = 0`,
		forget: `DELETE FROM ` + name + key,
	}
}

// Look implements driver.Ledger.
func (l *ledger) Look(ctx context.Context, id uuid.UUID) (e inboxdriver.LedgerEntry, err error) {
	ctx, cancel := context.WithTimeout(ctx, ledgerTimeout)
	defer cancel()
	var overdue int64 // in milliseconds
	err = pgcall.Use(ctx, l.pool, func(ctx context.Context, conn *pgxpool.Conn) error {
		return conn.QueryRow(ctx, l.look, l.consumer, id).Scan(&e.Replays, &e.Attempt, &e.Open, &overdue)
	})
	if errors.Is(err, pgx.ErrNoRows) {
		return inboxdriver.LedgerEntry{}, nil
	}
	e.Overdue = time.Duration(overdue) * time.Millisecond
	return e, l.wrap(err)
}

// Start implements driver.Ledger.
func (l *ledger) Start(ctx context.Context, m *inbox.Message) error {
	return l.put(ctx, l.start, m.ID, m.Replays, max(m.Attempt, 1), 1, m.Name, time.Duration(0))
}

// End implements driver.Ledger.
func (l *ledger) End(ctx context.Context, m *inbox.Message) error {
	n, err := l.exec(ctx, l.end, m.ID)
	if err != nil || n > 0 {
		return err
	}
	left, err := l.Look(ctx, m.ID)
	if err == nil && left.Open > 0 {
		err = l.ignored(m.ID)
	}
	return err
}

// Pass implements driver.Ledger.
func (l *ledger) Pass(ctx context.Context, m *inbox.Message, after time.Duration) error {
	return l.put(ctx, l.pass, m.ID, m.Replays, max(m.Attempt, 1)+1, 0, m.Name, after)
}

// Forget implements driver.Ledger.
func (l *ledger) Forget(ctx context.Context, id uuid.UUID) error {
	n, err := l.exec(ctx, l.forget, id)
	if err != nil || n > 0 {
		return err
	}
	left, err := l.Look(ctx, id)
	if err == nil && left != (inboxdriver.LedgerEntry{}) {
		err = l.ignored(id)
	}
	return err
}

// put writes a note, which always changes one row.
func (l *ledger) put(ctx context.Context, sql string, id uuid.UUID, args ...any) error {
	n, err := l.exec(ctx, sql, append([]any{id}, args...)...)
	if err == nil && n == 0 {
		err = l.ignored(id)
	}
	return err
}

func (l *ledger) ignored(id uuid.UUID) error {
	return l.wrap(pgcall.Ignored(l.table, "the note on message "+id.String()))
}

// exec works at READ COMMITTED, where two notes on one message wait for each other.
func (l *ledger) exec(ctx context.Context, sql string, args ...any) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, ledgerTimeout)
	defer cancel()
	n, err := pgcall.Exec(ctx, l.pool, sql, append([]any{l.consumer}, args...)...)
	return n, l.wrap(err)
}

func (l *ledger) wrap(err error) error {
	if err != nil {
		return fmt.Errorf("inboxpgx: ledger: %w", l.missing.Explain(err))
	}
	return nil
}
