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
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/chunk"
	"github.com/holdfast-go/holdfast/internal/migrate"
	"github.com/holdfast-go/holdfast/internal/pgcall"
)

// attemptsSuffix makes the name of the ledger's table out of the main one's.
const attemptsSuffix = "_attempts"

// ledgerTimeout bounds each call. Whoever repeats it gets another connection.
const ledgerTimeout = 4 * time.Second

// Ledger is the driver.Ledger in Postgres, on the second table that Migrate creates. It uses
// connections of its own; a call takes 4 seconds at most. It is safe for concurrent use.
type Ledger struct {
	missing                        migrate.Missing
	pool                           *pgxpool.Pool
	look, start, end, pass, forget string
}

// NewLedger returns a Ledger. It does not look at the database.
func NewLedger(pool *pgxpool.Pool, cfg SchemaConfig) (*Ledger, error) {
	name, err := cfg.attempts()
	if pool == nil {
		err = errors.Join(errors.New("inboxpgx: pool is nil"), err)
	}
	if err != nil {
		return nil, err
	}
	// newest keeps the pair of replays and attempt from going back.
	const newest = `replays = greatest(a.replays, excluded.replays), updated_at = now(),
		attempt = CASE WHEN (a.replays, a.attempt) < (excluded.replays, excluded.attempt) THEN excluded.attempt ELSE a.attempt END`
	const key = ` WHERE consumer = $1 AND message_id = $2`
	upsert := `INSERT INTO ` + name + ` AS a (consumer, message_id, replays, attempt, open, name) VALUES ($1, $2, $3, $4, $5, $6)
		ON CONFLICT (consumer, message_id) DO UPDATE SET `
	return &Ledger{
		missing: cfg.missing(),
		pool:    pool,
		look:    `SELECT replays, attempt, open FROM ` + name + key,
		start:   upsert + newest + `, open = CASE WHEN a.replays < excluded.replays THEN 1 ELSE a.open + 1 END`,
		end:     `UPDATE ` + name + ` SET open = 0, updated_at = now()` + key,
		pass:    upsert + newest + `, open = 0`,
		forget:  `DELETE FROM ` + name + key,
	}, nil
}

// Look implements driver.Ledger.
func (l *Ledger) Look(ctx context.Context, consumer string, id uuid.UUID) (e driver.LedgerEntry, err error) {
	ctx, cancel := context.WithTimeout(ctx, ledgerTimeout)
	defer cancel()
	err = pgcall.Use(ctx, l.pool, func(ctx context.Context, conn *pgxpool.Conn) error {
		return conn.QueryRow(ctx, l.look, consumer, id).Scan(&e.Replays, &e.Attempt, &e.Open)
	})
	if errors.Is(err, pgx.ErrNoRows) {
		return driver.LedgerEntry{}, nil
	}
	return e, l.wrap(err)
}

// Start implements driver.Ledger.
func (l *Ledger) Start(ctx context.Context, consumer string, m *inbox.Message) error {
	return l.exec(ctx, l.start, consumer, m.ID, m.Replays, max(m.Attempt, 1), 1, m.Name)
}

// End implements driver.Ledger.
func (l *Ledger) End(ctx context.Context, consumer string, m *inbox.Message) error {
	return l.exec(ctx, l.end, consumer, m.ID)
}

// Pass implements driver.Ledger.
func (l *Ledger) Pass(ctx context.Context, consumer string, m *inbox.Message) error {
	return l.exec(ctx, l.pass, consumer, m.ID, m.Replays, max(m.Attempt, 1)+1, 0, m.Name)
}

// Forget implements driver.Ledger.
func (l *Ledger) Forget(ctx context.Context, consumer string, id uuid.UUID) error {
	return l.exec(ctx, l.forget, consumer, id)
}

// exec works at READ COMMITTED, where two notes on one message wait for each other.
func (l *Ledger) exec(ctx context.Context, sql string, args ...any) error {
	ctx, cancel := context.WithTimeout(ctx, ledgerTimeout)
	defer cancel()
	_, err := chunk.Exec(ctx, l.pool, sql, args...)
	return l.wrap(err)
}

func (l *Ledger) wrap(err error) error {
	if err != nil {
		return fmt.Errorf("inboxpgx: ledger: %w", l.missing.Explain(err))
	}
	return nil
}
