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
	"github.com/holdfast-go/holdfast/internal/migrate"
	"github.com/holdfast-go/holdfast/txretry"
	txdriver "github.com/holdfast-go/holdfast/txretry/driver"
)

// table is the driver.Entries in Postgres.
type table struct {
	pool    *pgxpool.Pool // of the ledger
	names   tables
	files   fs.FS // the migrations
	missing migrate.Missing

	insert, insertAll, forget string
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
	return &table{
		pool: pool, names: names, files: files, missing: names.missing(),
		insert: `INSERT INTO ` + names.entries + ` (consumer, message_id) VALUES ($1, $2) ON CONFLICT DO NOTHING`,
		// In the order of the ids: two batches with the same copies must not deadlock.
		insertAll: `INSERT INTO ` + names.entries + ` (consumer, message_id) SELECT $1, m.id
			FROM unnest($2::uuid[]) AS m (id) ORDER BY m.id ON CONFLICT DO NOTHING RETURNING message_id`,
		forget: `DELETE FROM ` + names.entries + ` WHERE consumer = $1 AND message_id = ANY($2::uuid[])`,
	}, nil
}

// Ledger implements driver.Entries.
func (t *table) Ledger(consumer string) inboxdriver.Ledger {
	return newLedger(t.pool, t.names, consumer)
}

// Parking implements driver.Entries.
func (t *table) Parking(consumer string) inboxdriver.Parking {
	return newParking(t.pool, t.names, consumer)
}

// Record implements driver.Entries.
func (t *table) Record(ctx context.Context, tx pgx.Tx, consumer string, id uuid.UUID) (first bool, err error) {
	tag, err := tx.Exec(ctx, t.insert, consumer, uuidOf(id))
	if err != nil {
		return false, fmt.Errorf("inboxpgx: record message: %w", t.missing.Explain(err))
	}
	return tag.RowsAffected() == 1, nil
}

// atBegin is Record as a statement that travels with BEGIN.
func (t *table) atBegin(consumer string, id uuid.UUID) txdriver.Statement {
	return txdriver.Statement{SQL: t.insert, Args: []any{consumer, uuidOf(id)}}
}

// RecordAll implements driver.Entries.
func (t *table) RecordAll(ctx context.Context, tx pgx.Tx, consumer string, msgs []*inbox.Message) (first []bool, err error) {
	ids := make(uuids, len(msgs))
	position := make(map[uuid.UUID]int, len(msgs))
	for i, m := range msgs {
		ids[i], position[m.ID] = uuidOf(m.ID), i
	}
	rows, err := tx.Query(ctx, t.insertAll, consumer, ids)
	if err != nil {
		return nil, fmt.Errorf("inboxpgx: record messages: %w", t.missing.Explain(err))
	}
	first = make([]bool, len(msgs))
	var id pgtype.UUID
	if _, err := pgx.ForEachRow(rows, []any{&id}, func() error {
		first[position[id.Bytes]] = true
		return nil
	}); err != nil {
		return nil, fmt.Errorf("inboxpgx: record messages: %w", t.missing.Explain(err))
	}
	return first, nil
}

// Forget implements driver.Entries.
func (t *table) Forget(ctx context.Context, tx pgx.Tx, consumer string, ids []uuid.UUID) error {
	all := make(uuids, len(ids))
	for i, id := range ids {
		all[i] = uuidOf(id)
	}
	if txretry.AtCommit(tx, t.forget, consumer, all) {
		return nil
	}
	if _, err := tx.Exec(ctx, t.forget, consumer, all); err != nil {
		return fmt.Errorf("inboxpgx: forget messages: %w", t.missing.Explain(err))
	}
	return nil
}

// uuids is an array that the client encodes in binary. Of []uuid.UUID it makes texts first.
type uuids = pgtype.FlatArray[pgtype.UUID]

func uuidOf(id uuid.UUID) pgtype.UUID { return pgtype.UUID{Bytes: id, Valid: true} }
