package inboxpgx

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox"
	inboxdriver "github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx/driver"
	"github.com/holdfast-go/holdfast/internal/migrate"
	"github.com/holdfast-go/holdfast/internal/pgcall"
	txdriver "github.com/holdfast-go/holdfast/txretry/driver"
)

// table is the driver.Entries in Postgres.
type table struct {
	pool    *pgxpool.Pool // of the ledger
	names   tables
	files   fs.FS // the migrations
	missing migrate.Missing

	insert, insertAll, recorded, forget string
	insertKeyed, insertAllKeyed         string // unless the key is stopped
}

func newTable(pool *pgxpool.Pool, names tables) (*table, error) {
	set, err := names.set()
	if err != nil {
		return nil, fmt.Errorf("inboxpgx: %w", err)
	}
	files, err := migrate.Export(set)
	if err != nil {
		return nil, fmt.Errorf("inboxpgx: %w", err)
	}
	open := func(key string) string {
		return `NOT EXISTS (SELECT FROM ` + names.stopped + ` AS s WHERE s.consumer = $1 AND s.key = ` + key + `)`
	}
	return &table{
		pool: pool, names: names, files: files, missing: names.missing(),
		insert: `INSERT INTO ` + names.entries + ` (consumer, message_id) VALUES ($1, $2) ON CONFLICT DO NOTHING`,
		// In the order of the ids, so that two batches with the same copies do not deadlock.
		insertAll: `INSERT INTO ` + names.entries + ` (consumer, message_id) SELECT $1, m.id
			FROM unnest($2::uuid[]) AS m (id) ORDER BY m.id ON CONFLICT DO NOTHING RETURNING message_id`,
		insertKeyed: `INSERT INTO ` + names.entries + ` (consumer, message_id) SELECT $1, $2::uuid WHERE ` + open("$3") + ` ON CONFLICT DO NOTHING`,
		insertAllKeyed: `INSERT INTO ` + names.entries + ` (consumer, message_id) SELECT $1, m.id
			FROM unnest($2::uuid[], $3::text[]) AS m (id, key) WHERE ` + open("m.key") + ` ORDER BY m.id ON CONFLICT DO NOTHING RETURNING message_id`,
		recorded: `SELECT message_id FROM ` + names.entries + ` WHERE consumer = $1 AND message_id = ANY($2::uuid[])`,
		forget:   `DELETE FROM ` + names.entries + ` WHERE consumer = $1 AND message_id = ANY($2::uuid[])`,
	}, nil
}

// Ledger implements driver.Entries.
func (t *table) Ledger(consumer string) inboxdriver.Ledger {
	return newLedger(t.pool, t.names, consumer)
}

// Parking implements driver.Entries.
func (t *table) Parking(consumer string) driver.Parking {
	return newParking(t.pool, t.names, consumer)
}

// Record implements driver.Entries.
func (t *table) Record(ctx context.Context, tx pgx.Tx, consumer string, id uuid.UUID, key string) (first bool, err error) {
	insert := t.atBegin(consumer, id, key)
	tag, err := tx.Exec(ctx, insert.SQL, insert.Args...)
	if err != nil {
		return false, fmt.Errorf("inboxpgx: record message: %w", t.missing.Explain(err))
	}
	return tag.RowsAffected() == 1, nil
}

// atBegin returns the statement of Record, to be sent together with BEGIN.
func (t *table) atBegin(consumer string, id uuid.UUID, key string) txdriver.Statement {
	if key == "" {
		return txdriver.Statement{SQL: t.insert, Args: []any{consumer, uuidOf(id)}}
	}
	return txdriver.Statement{SQL: t.insertKeyed, Args: []any{consumer, uuidOf(id), key}}
}

// RecordAll implements driver.Entries.
func (t *table) RecordAll(ctx context.Context, tx pgx.Tx, consumer string, msgs []*inbox.Message, keys []string) (first []bool, err error) {
	ids := make(uuids, len(msgs))
	position := make(map[uuid.UUID]int, len(msgs))
	for i, m := range msgs {
		ids[i], position[m.ID] = uuidOf(m.ID), i
	}
	first, err = marked(position, func() (pgx.Rows, error) {
		if keys == nil {
			return tx.Query(ctx, t.insertAll, consumer, ids)
		}
		return tx.Query(ctx, t.insertAllKeyed, consumer, ids, keys)
	})
	if err != nil {
		return nil, fmt.Errorf("inboxpgx: record messages: %w", t.missing.Explain(err))
	}
	return first, nil
}

// Recorded implements driver.Entries. It runs outside the transaction that made no entry: a trigger may have
// put the row elsewhere, and that transaction would see it as an entry.
func (t *table) Recorded(ctx context.Context, consumer string, ids []uuid.UUID) (recorded []bool, err error) {
	position := make(map[uuid.UUID]int, len(ids))
	for i, id := range ids {
		position[id] = i
	}
	ctx, cancel := context.WithTimeout(ctx, ledgerTimeout)
	defer cancel()
	err = pgcall.Use(ctx, t.pool, func(ctx context.Context, conn *pgxpool.Conn) (err error) {
		recorded, err = marked(position, func() (pgx.Rows, error) { return conn.Query(ctx, t.recorded, consumer, uuidsOf(ids)) })
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("inboxpgx: look for entries: %w", t.missing.Explain(err))
	}
	return recorded, nil
}

// marked reports for each position whether the query returned its id.
func marked(position map[uuid.UUID]int, query func() (pgx.Rows, error)) ([]bool, error) {
	rows, err := query()
	if err != nil {
		return nil, err
	}
	found := make([]bool, len(position))
	var id pgtype.UUID
	_, err = pgx.ForEachRow(rows, []any{&id}, func() error {
		if at, asked := position[id.Bytes]; asked {
			found[at] = true
		}
		return nil
	})
	return found, err
}

// Forget implements driver.Entries. It does not wait for COMMIT: if an entry stayed, the retry of its message
// would count as a duplicate.
func (t *table) Forget(ctx context.Context, tx pgx.Tx, consumer string, ids []uuid.UUID) error {
	tag, err := tx.Exec(ctx, t.forget, consumer, uuidsOf(ids))
	if err != nil {
		return fmt.Errorf("inboxpgx: forget messages: %w", t.missing.Explain(err))
	}
	if deleted := tag.RowsAffected(); deleted != int64(len(ids)) {
		return fmt.Errorf("inboxpgx: forget messages: %w", pgcall.Ignored(t.names.entries, fmt.Sprintf("the DELETE of %d entries of %d", int64(len(ids))-deleted, len(ids))))
	}
	return nil
}

// uuids is an array that the client encodes in binary. It would convert []uuid.UUID to text first.
type uuids = pgtype.FlatArray[pgtype.UUID]

func uuidsOf(ids []uuid.UUID) uuids {
	all := make(uuids, len(ids))
	for i, id := range ids {
		all[i] = uuidOf(id)
	}
	return all
}

func uuidOf(id uuid.UUID) pgtype.UUID { return pgtype.UUID{Bytes: id, Valid: true} }

// ledgerTimeout bounds each call. A repeated call gets another connection.
const ledgerTimeout = 4 * time.Second

// ledger is the driver.Ledger of one consumer in Postgres. It uses connections of its own; a call takes at
// most 4 seconds. It is safe for concurrent use.
type ledger struct {
	pool     *pgxpool.Pool
	consumer string
	table    string
	missing  migrate.Missing

	look, start, end, pass, forget string
}

func newLedger(pool *pgxpool.Pool, names tables, consumer string) *ledger {
	name := names.attempts
	// newest keeps the pair of replays and attempt from decreasing.
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
	return l.change(ctx, l.end, m.ID, func(left inboxdriver.LedgerEntry) bool { return left.Open > 0 })
}

// Pass implements driver.Ledger.
func (l *ledger) Pass(ctx context.Context, m *inbox.Message, after time.Duration) error {
	return l.put(ctx, l.pass, m.ID, m.Replays, max(m.Attempt, 1)+1, 0, m.Name, after)
}

// Forget implements driver.Ledger.
func (l *ledger) Forget(ctx context.Context, id uuid.UUID) error {
	return l.change(ctx, l.forget, id, func(left inboxdriver.LedgerEntry) bool { return left != inboxdriver.LedgerEntry{} })
}

// change runs a statement that changes the row of a message, if there is one to change.
func (l *ledger) change(ctx context.Context, sql string, id uuid.UUID, there func(inboxdriver.LedgerEntry) bool) error {
	ignored, err := pgcall.Changes(func() (int64, error) { return l.exec(ctx, sql, id) }, func() (bool, error) {
		left, err := l.Look(ctx, id)
		return there(left), err
	})
	if ignored {
		return l.ignored(id)
	}
	return err
}

// put writes a row, which always changes one row.
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

// exec runs at READ COMMITTED, at which two writes about one message wait for each other.
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
