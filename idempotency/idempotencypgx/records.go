package idempotencypgx

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/idempotency/driver"
	pgxdriver "github.com/holdfast-go/holdfast/idempotency/idempotencypgx/driver"
	"github.com/holdfast-go/holdfast/idempotency/internal/headers"
	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/internal/pgcheck"
	"github.com/holdfast-go/holdfast/internal/pgprune"
)

// recordColumns are the columns that row.fields reads.
const recordColumns = `fingerprint_version, fingerprint, code, headers, body, token`

// row is a record as stored in the table.
type row struct {
	fingerprint driver.Fingerprint
	code        int
	headers     string
	body        []byte
	token       string
}

// table is Records on a Postgres table. It is safe for concurrent use.
type table struct {
	asker     *asker
	name      string // qualified and quoted
	find      string // selects the record of the key $1
	retention time.Duration
}

func newTable(pool *pgxpool.Pool, name string, retention time.Duration) *table {
	return &table{
		asker: newAsker(pool, name), name: name, retention: retention,
		find: `SELECT ` + recordColumns + ` FROM ` + name + ` WHERE key = $1 AND status = 'completed'`,
	}
}

// recordOf reads the record of key; false means that there is none.
func recordOf(key driver.Key, found pgx.Row) (pgxdriver.Record, bool, error) {
	var r row
	err := found.Scan(r.fields()...)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return pgxdriver.Record{}, false, nil
	case err != nil:
		return pgxdriver.Record{}, false, err
	}
	return pgxdriver.Record{Key: key, Token: r.token, Fingerprint: r.fingerprint, Response: r.response()}, true, nil
}

// fields returns the scan targets of recordColumns, in their order.
func (r *row) fields() []any {
	return []any{&r.fingerprint.Version, &r.fingerprint.Sum, &r.code, &r.headers, &r.body, &r.token}
}

// response returns the stored response. An unreadable one is a tombstone, because the work was done.
func (r *row) response() driver.Response {
	header, err := headers.Decode(r.headers)
	if err != nil {
		return driver.Response{}
	}
	return driver.Response{Status: r.code, Header: header, Body: r.body}
}

// Insert implements pgxdriver.Records. It is one statement, sent together with COMMIT if tx is a handle of txretry.
func (t *table) Insert(ctx context.Context, tx pgx.Tx, rec pgxdriver.Record) error {
	sql, args, err := t.insert(rec)
	if err != nil {
		return err
	}
	h, ok := tx.(interface {
		AtCommitExplained(explain func(error) error, sql string, args ...any) bool
	})
	if ok && h.AtCommitExplained(t.explain, sql, args...) {
		return nil
	}
	if _, err := tx.Exec(ctx, sql, args...); err != nil {
		return fmt.Errorf("idempotencypgx: insert record: %w", t.explain(err))
	}
	return nil
}

// explain adds to err that the table is missing, or that it ignored a record.
func (t *table) explain(err error) error {
	return pgcall.ExplainOneRow(t.name, t.asker.missing.Explain(err))
}

// insert has no ON CONFLICT. The unique violation stops a second effect, and at SERIALIZABLE a statement that does
// nothing would not count as a read.
func (t *table) insert(rec pgxdriver.Record) (sql string, args []any, err error) {
	header, err := headers.Encode(rec.Response.Header)
	if err != nil {
		return "", nil, fmt.Errorf("idempotencypgx: insert record: %w", err)
	}
	sql = pgcall.OneRow(`INSERT INTO ` + t.name + `
		(key, fingerprint_version, fingerprint, status, code, headers, body, token, expires_at)
		VALUES ($1, $2, $3, 'completed', $4, $5, $6, $7, clock_timestamp() + $8::interval)`)
	return sql, []any{
		string(rec.Key), rec.Fingerprint.Version, rec.Fingerprint.Sum, rec.Response.Status,
		header, rec.Response.Body, rec.Token, t.retention,
	}, nil
}

// Lookup implements pgxdriver.Records.
func (t *table) Lookup(ctx context.Context, key driver.Key) (rec pgxdriver.Record, found bool, err error) {
	err = t.asker.ask(ctx, false, func(ctx context.Context, conn *pgxpool.Conn) (err error) {
		rec, found, err = recordOf(key, conn.QueryRow(ctx, t.find, string(key)))
		return err
	})
	if err != nil {
		return pgxdriver.Record{}, false, fmt.Errorf("idempotencypgx: look up record: %w", err)
	}
	return rec, found, nil
}

// Resolve implements pgxdriver.Records. A SELECT does not see the row of a transaction that is still committing, but
// an INSERT of the same key waits for that transaction. The inserted row is never committed.
func (t *table) Resolve(ctx context.Context, key driver.Key) (pgxdriver.Record, bool, error) {
	free, err := t.probe(ctx, key)
	if err != nil {
		return pgxdriver.Record{}, false, fmt.Errorf("idempotencypgx: resolve record: %w", err)
	}
	if free {
		return pgxdriver.Record{}, false, nil
	}
	return t.Lookup(ctx, key)
}

// beginProbe limits a probe whose client has vanished, because the lock of its row blocks the key for everybody. The
// lock_timeout is longer than resolveTimeout, so a client that is alive ends the wait first. A stricter level could
// turn the result into a serialization failure.
const beginProbe = `BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = '11s'; SET LOCAL idle_in_transaction_session_timeout = '5s'`

// probe reports whether no transaction has a record of the key. It may wait for another transaction, which does not
// mean that the server is silent, so only BEGIN is retried.
func (t *table) probe(ctx context.Context, key driver.Key) (free bool, err error) {
	sql, args, err := t.insert(pgxdriver.Record{Key: key})
	if err != nil {
		return false, err
	}
	err = t.asker.ask(ctx, false, func(begin context.Context, conn *pgxpool.Conn) error {
		tx, err := conn.BeginTx(begin, pgx.TxOptions{BeginQuery: beginProbe})
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
		return t.explain(err)
	})
	return free && err == nil, err
}

// newPruner returns a pruner of records whose retention is over, and of expired claims.
func (t *table) newPruner(cfg Config) (*pgprune.Pruner, error) {
	return pgprune.New(pgprune.Config{
		Pool: t.asker.pool, Table: t.name, Core: "idempotency",
		Statements: []pgprune.Statement{t.due()},
		Interval:   cfg.PruneInterval, Explain: t.asker.missing.Explain, Logger: cfg.Logger,
	})
}

// due selects those records and claims. It uses now, because a scan with the volatile clock_timestamp cannot use an
// index and would read every record.
func (t *table) due() pgprune.Statement {
	return pgprune.Statement{
		Table: t.name, ID: "key",
		Due: `expires_at <= now() AND (lease_until IS NULL OR lease_until <= now()) ORDER BY expires_at`,
	}
}

// check reports a table that is missing, out of date, or that may drop writes.
func (t *table) check(ctx context.Context) error {
	found := check.Findings{Component: component}
	err := t.asker.ask(ctx, false, func(ctx context.Context, conn *pgxpool.Conn) error {
		found = check.Findings{Component: component}
		if err := pgcheck.Settings(ctx, conn, &found); err != nil {
			return err
		}
		if _, err := conn.Exec(ctx, `SELECT key, status, created_at, expires_at, lease_until, `+recordColumns+` FROM `+t.name+` LIMIT 0`); err != nil {
			return err
		}
		return pgcheck.Drops(ctx, conn, &found, t.name)
	})
	if err == nil {
		return found.Err()
	}
	if answer, ok := errors.AsType[*pgconn.PgError](err); ok {
		switch answer.Code {
		case "42P01", "3F000", "42703": // undefined table, schema, column
			return check.New(component, "table "+t.name+" is missing or out of date: "+answer.Message,
				"call Migrate, or apply the files of Schema")
		}
	}
	return fmt.Errorf("idempotencypgx: check: %w", err)
}

// SQLSTATEs.
const (
	uniqueViolation      = "23505"
	serializationFailure = "40001"
)

// Look implements driver.Looker. It reads only the table; look up a Gate separately. With Config.Records the times
// are unknown.
func (s *Store) Look(ctx context.Context, key driver.Key) (driver.Known, error) {
	if err := key.Validate(); err != nil {
		return driver.Known{}, err
	}
	if s.table != nil {
		return s.table.look(ctx, key)
	}
	rec, found, err := s.records.Lookup(ctx, key)
	if err != nil || !found {
		return driver.Known{}, err
	}
	return driver.Known{State: driver.Completed, Fingerprint: rec.Fingerprint, Response: rec.Response}, nil
}

// look prefers the record of a transaction to the claim of its key: the claim may still be held until the answer is
// stored, and may later hold a copy of the record.
func (t *table) look(ctx context.Context, key driver.Key) (driver.Known, error) {
	var r row
	var known driver.Known
	var completed bool
	err := t.asker.ask(ctx, false, func(ctx context.Context, conn *pgxpool.Conn) error {
		return conn.QueryRow(ctx, `SELECT `+recordColumns+`, status = 'completed', created_at,
				greatest(coalesce(lease_until, expires_at) - clock_timestamp(), interval '0')
			FROM `+t.name+` WHERE key = $1 AND status = 'completed'
				OR key = $2 AND coalesce(lease_until, expires_at) > clock_timestamp()
			ORDER BY key = $1 DESC LIMIT 1`, string(key), rowOf(driver.Claim{Key: key}),
		).Scan(append(r.fields(), &completed, &known.Since, &known.Left)...)
	})
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return driver.Known{}, nil
	case err != nil:
		return driver.Known{}, fmt.Errorf("idempotencypgx: look: %w", err)
	}
	known.State, known.Fingerprint = driver.InProgress, r.fingerprint
	if completed {
		known.State, known.Response = driver.Completed, r.response()
	}
	return known, nil
}

// newest limits the rows that InFlight reads.
const newest = 10_000

// InFlight returns the number of held claims among the 10,000 newest keys. exact is true if there are fewer keys.
// Claims of a Gate do not count. With Config.Records it returns 0.
func (s *Store) InFlight(ctx context.Context) (n int, exact bool, err error) {
	if s.table == nil {
		return 0, true, nil
	}
	err = s.table.asker.ask(ctx, false, func(ctx context.Context, conn *pgxpool.Conn) error {
		return conn.QueryRow(ctx, `SELECT count(*) FILTER (WHERE lease_until > clock_timestamp()), count(*) < $1
			FROM (SELECT lease_until FROM `+s.table.name+` ORDER BY expires_at DESC LIMIT $1) AS newest`, newest).Scan(&n, &exact)
	})
	if err != nil {
		return 0, false, fmt.Errorf("idempotencypgx: in flight: %w", err)
	}
	return n, exact, nil
}
