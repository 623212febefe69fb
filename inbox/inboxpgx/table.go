package inboxpgx

import (
	"context"
	"fmt"
	"io/fs"

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
		// In the order of the ids: two batches with the same copies must not deadlock.
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

// atBegin is Record as a statement that travels with BEGIN.
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

// Recorded implements driver.Entries. It runs outside of the transaction that made no entry: a trigger may have
// put the row elsewhere, which that transaction would take for an entry.
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

// Forget implements driver.Entries. It does not wait for COMMIT: with an entry that stays, the retry of its
// message would count as a duplicate.
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

// uuids is an array that the client encodes in binary. Of []uuid.UUID it makes texts first.
type uuids = pgtype.FlatArray[pgtype.UUID]

func uuidsOf(ids []uuid.UUID) uuids {
	all := make(uuids, len(ids))
	for i, id := range ids {
		all[i] = uuidOf(id)
	}
	return all
}

func uuidOf(id uuid.UUID) pgtype.UUID { return pgtype.UUID{Bytes: id, Valid: true} }
