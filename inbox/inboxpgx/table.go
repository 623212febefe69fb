package inboxpgx

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/migrate"
	"github.com/holdfast-go/holdfast/internal/sqlident"
	"github.com/holdfast-go/holdfast/txretry"
	txdriver "github.com/holdfast-go/holdfast/txretry/driver"
)

// DefaultTable is the table's name where none is configured.
const DefaultTable = "holdfast_inbox"

//go:embed migrations/*.sql
var migrations embed.FS

// SchemaConfig says where the table is.
type SchemaConfig struct {
	// Schema holds the table; empty means that the connection's search_path decides.
	Schema string
	// Table is the table's name; empty means DefaultTable. The Ledger's is <Table>_attempts.
	Table string
}

func (c SchemaConfig) withDefaults() SchemaConfig {
	if c.Table == "" {
		c.Table = DefaultTable
	}
	return c
}

// qualified returns the table's quoted name.
func (c SchemaConfig) qualified() (string, error) {
	c = c.withDefaults()
	name, err := sqlident.Qualify(c.Schema, c.Table)
	if err != nil {
		return "", fmt.Errorf("inboxpgx: table name: %w", err)
	}
	return name, nil
}

// attempts returns the quoted name of the ledger's table.
func (c SchemaConfig) attempts() (string, error) {
	c = c.withDefaults()
	return SchemaConfig{Schema: c.Schema, Table: c.Table + attemptsSuffix}.qualified()
}

// missing explains the errors of a database without the tables.
func (c SchemaConfig) missing() migrate.Missing {
	name, err1 := c.qualified()
	attempts, err2 := c.attempts()
	if errors.Join(err1, err2) != nil {
		return migrate.Missing{}
	}
	return migrate.Missing{Call: "inboxpgx.Migrate", Tables: []string{name, attempts}}
}

func (c SchemaConfig) set() (migrate.Set, error) {
	c = c.withDefaults()
	files, err := fs.Sub(migrations, "migrations")
	return migrate.Set{Component: "inbox", Files: files, Schema: c.Schema, Names: map[string]string{"table": c.Table, "attempts": c.Table + attemptsSuffix}}, err
}

// Migrate creates the table or brings it up to date. Several processes may do so at once.
func Migrate(ctx context.Context, pool *pgxpool.Pool, cfg SchemaConfig) error {
	set, err := cfg.set()
	if err != nil {
		return fmt.Errorf("inboxpgx: %w", err)
	}
	return migrate.Apply(ctx, pool, set)
}

// Migrations returns the numbered SQL files that Migrate applies, for another tool.
func Migrations(cfg SchemaConfig) (fs.FS, error) {
	set, err := cfg.set()
	if err != nil {
		return nil, fmt.Errorf("inboxpgx: %w", err)
	}
	return migrate.Export(set)
}

// Dedup records which messages a consumer has processed, as part of a transaction. *Table
// does so in Postgres, inboxtest.Dedup in memory; the suite is in inboxtest/conformance.
type Dedup interface {
	// Record reports whether this is the first time that the consumer records the id,
	// and records it. The entry commits and rolls back with tx. While another transaction
	// that recorded the same id is open it waits, or fails so that txretry tries again.
	Record(ctx context.Context, tx pgx.Tx, consumer string, id uuid.UUID) (first bool, err error)
	// RecordAll is Record for several messages with different ids, in one step.
	RecordAll(ctx context.Context, tx pgx.Tx, consumer string, msgs []*inbox.Message) (first []bool, err error)
	// Forget takes back, within the same transaction, what Record or RecordAll has
	// recorded there for the first time.
	Forget(ctx context.Context, tx pgx.Tx, consumer string, ids []uuid.UUID) error
}

// Table is the Dedup on the table that Migrate creates. It is safe for concurrent use.
type Table struct {
	insert, insertAll, forget string
	missing                   migrate.Missing
}

// NewTable returns a Table. It does not look at the database.
func NewTable(cfg SchemaConfig) (*Table, error) {
	name, err := cfg.qualified()
	if err != nil {
		return nil, err
	}
	return &Table{
		missing: cfg.missing(),
		insert:  `INSERT INTO ` + name + ` (consumer, message_id, name) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING`,
		// In the order of the ids: two batches with the same copies must not deadlock.
		insertAll: `INSERT INTO ` + name + ` (consumer, message_id, name) SELECT $1, m.id, m.name
			FROM unnest($2::uuid[], $3::text[]) AS m (id, name) ORDER BY m.id ON CONFLICT DO NOTHING RETURNING message_id`,
		forget: `DELETE FROM ` + name + ` WHERE consumer = $1 AND message_id = ANY($2::uuid[])`,
	}, nil
}

// Record implements Dedup. For people who look at the table it notes the name of the
// message in ctx, too.
func (t *Table) Record(ctx context.Context, tx pgx.Tx, consumer string, id uuid.UUID) (first bool, err error) {
	var name string
	if m, ok := inbox.FromContext(ctx); ok {
		name = m.Name
	}
	tag, err := tx.Exec(ctx, t.insert, consumer, uuidOf(id), name)
	if err != nil {
		return false, fmt.Errorf("inboxpgx: record message: %w", t.missing.Explain(err))
	}
	return tag.RowsAffected() == 1, nil
}

// atBegin is Record as a statement that travels with BEGIN.
func (t *Table) atBegin(consumer string, m *inbox.Message) txdriver.Statement {
	return txdriver.Statement{SQL: t.insert, Args: []any{consumer, uuidOf(m.ID), m.Name}}
}

// RecordAll implements Dedup.
func (t *Table) RecordAll(ctx context.Context, tx pgx.Tx, consumer string, msgs []*inbox.Message) (first []bool, err error) {
	ids, names := make(uuids, len(msgs)), make([]string, len(msgs))
	position := make(map[uuid.UUID]int, len(msgs))
	for i, m := range msgs {
		ids[i], names[i], position[m.ID] = uuidOf(m.ID), m.Name, i
	}
	rows, err := tx.Query(ctx, t.insertAll, consumer, ids, names)
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

// Forget implements Dedup.
func (t *Table) Forget(ctx context.Context, tx pgx.Tx, consumer string, ids []uuid.UUID) error {
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
