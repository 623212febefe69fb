package idempotencypgx

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/internal/headers"
)

// Record is what a business transaction leaves behind for its key.
type Record struct {
	Key         idempotency.Key
	Token       string // of the claim it was made under
	Fingerprint idempotency.Fingerprint
	Response    idempotency.Response
}

// Records is the table of records that a Runner writes in the business
// transaction. The suite in idempotencytest/conformance says what an
// implementation must do.
type Records interface {
	// Insert stores rec with the transaction. A second record of the key makes
	// the transaction fail, at Insert or at COMMIT.
	Insert(ctx context.Context, tx pgx.Tx, rec Record) error
	// Lookup returns the committed record of the key.
	Lookup(ctx context.Context, key idempotency.Key) (rec Record, found bool, err error)
	// Resolve is Lookup that first waits for every transaction that has
	// inserted a record of the key and has not ended yet.
	Resolve(ctx context.Context, key idempotency.Key) (rec Record, found bool, err error)
}

// RecordsConfig configures a Table. The zero value is usable.
type RecordsConfig struct {
	SchemaConfig
	// Retention is after what time Prune may delete a record. Until it does,
	// the record counts. 0: 48 h.
	Retention time.Duration
}

// Table is Records on a Postgres table, in the database of the business
// transactions. It is safe for concurrent use.
type Table struct {
	asker     *asker
	table     string
	retention time.Duration
}

// NewRecords returns the records in a table (see Migrate). pool stays the
// caller's to close.
func NewRecords(pool *pgxpool.Pool, cfg RecordsConfig) (*Table, error) {
	cfg.SchemaConfig = cfg.SchemaConfig.withDefaults()
	if cfg.Retention == 0 {
		cfg.Retention = defaultRetention
	}
	var errs []error
	if pool == nil {
		errs = append(errs, errors.New("idempotencypgx: pool is nil"))
	}
	if cfg.Retention < 0 {
		errs = append(errs, errors.New("idempotencypgx: Retention is negative"))
	}
	table, err := cfg.quoted()
	if err := errors.Join(append(errs, err)...); err != nil {
		return nil, err
	}
	return &Table{asker: newAsker(pool, table), table: table, retention: cfg.Retention}, nil
}

// Insert implements Records: one statement, sent together with COMMIT when tx
// is a handle of txretry.
func (t *Table) Insert(ctx context.Context, tx pgx.Tx, rec Record) error {
	sql, args, err := t.insert(rec)
	if err != nil {
		return err
	}
	if t.asker.missing.AtCommit(tx, sql, args...) {
		return nil
	}
	if _, err := tx.Exec(ctx, sql, args...); err != nil {
		return fmt.Errorf("idempotencypgx: insert record: %w", t.asker.missing.Explain(err))
	}
	return nil
}

// insert has no ON CONFLICT: the unique violation is what stops a second
// effect, and at SERIALIZABLE a statement that does nothing would not count as
// a read.
func (t *Table) insert(rec Record) (sql string, args []any, err error) {
	header, err := headers.Encode(rec.Response.Header)
	if err != nil {
		return "", nil, fmt.Errorf("idempotencypgx: insert record: %w", err)
	}
	sql = `INSERT INTO ` + t.table + `
		(key, fingerprint_version, fingerprint, status, code, headers, body, token, expires_at)
		VALUES ($1, $2, $3, 'completed', $4, $5, $6, $7, clock_timestamp() + $8::interval)`
	return sql, []any{
		string(rec.Key), rec.Fingerprint.Version, rec.Fingerprint.Sum, rec.Response.Status,
		header, rec.Response.Body, rec.Token, t.retention,
	}, nil
}

// Lookup implements Records.
func (t *Table) Lookup(ctx context.Context, key idempotency.Key) (Record, bool, error) {
	var r row
	err := t.asker.ask(ctx, false, func(ctx context.Context, conn *pgxpool.Conn) error {
		return conn.QueryRow(ctx, `SELECT `+recordColumns+` FROM `+t.table+`
			WHERE key = $1 AND status = 'completed'`, string(key)).Scan(r.fields()...)
	})
	if errors.Is(err, pgx.ErrNoRows) {
		return Record{}, false, nil
	}
	if err != nil {
		return Record{}, false, fmt.Errorf("idempotencypgx: look up record: %w", err)
	}
	return Record{Key: key, Token: r.token, Fingerprint: r.fingerprint, Response: r.response()}, true, nil
}

// Resolve implements Records. A SELECT would not do: it passes over the row of
// a transaction that is still committing, while an INSERT of the same key waits
// for it. The inserted row is never committed.
func (t *Table) Resolve(ctx context.Context, key idempotency.Key) (Record, bool, error) {
	free, err := t.probe(ctx, key)
	if err != nil {
		return Record{}, false, fmt.Errorf("idempotencypgx: resolve record: %w", err)
	}
	if free {
		return Record{}, false, nil
	}
	return t.Lookup(ctx, key)
}

// Check reports a missing or outdated table.
func (t *Table) Check(ctx context.Context) ([]idempotency.Finding, error) {
	return t.asker.check(ctx, t.table)
}

// probe may have to wait for another transaction, which is not the server's silence:
// only BEGIN is tried again.
func (t *Table) probe(ctx context.Context, key idempotency.Key) (free bool, err error) {
	sql, args, err := t.insert(Record{Key: key})
	if err != nil {
		return false, err
	}
	err = t.asker.ask(ctx, false, func(begin context.Context, conn *pgxpool.Conn) error {
		// A stricter level could turn the answer into a serialization failure.
		tx, err := conn.BeginTx(begin, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
		if err != nil {
			return err
		}
		_, err = tx.Exec(ctx, sql, args...)
		free = err == nil
		if rollback := tx.Rollback(ctx); err == nil {
			return rollback
		}
		if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && pgErr.Code == uniqueViolation {
			return nil
		}
		return err
	})
	return free && err == nil, err
}

// SQLSTATEs.
const (
	uniqueViolation      = "23505"
	serializationFailure = "40001"
)
