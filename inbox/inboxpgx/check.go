package inboxpgx

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/pgcall"
)

const component = "inboxpgx"

// checkTimeout bounds the questions of one Check.
const checkTimeout = 10 * time.Second

// pruneGrace is how much older than the retention an entry may get before Check tells.
const pruneGrace = 24 * time.Hour

// Check looks for what is missing or mis-set in the database: the table, its key, the
// right to insert, and entries that should long have been pruned. No findings mean that
// all is well; an error means that it could not look, which it finds out within 20 seconds.
func Check(ctx context.Context, pool *pgxpool.Pool, cfg PruneConfig) ([]inbox.Finding, error) {
	cfg = cfg.withDefaults()
	schema := SchemaConfig{Schema: cfg.Schema, Table: cfg.Table}.withDefaults()
	name, err := schema.qualified()
	if err := errors.Join(err, cfg.validate()); err != nil {
		return nil, err
	}
	var findings []inbox.Finding
	err = pgcall.Twice(ctx, pool, checkTimeout, func(ctx context.Context, conn *pgxpool.Conn) (err error) {
		findings, err = look(ctx, conn, cfg, schema, name)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("inboxpgx: check: %w", err)
	}
	return findings, nil
}

func look(ctx context.Context, conn *pgxpool.Conn, cfg PruneConfig, schema SchemaConfig, name string) ([]inbox.Finding, error) {
	var unique, insertable bool
	err := conn.QueryRow(ctx, `SELECT has_table_privilege(to_regclass($1), 'INSERT'), EXISTS (
		SELECT FROM pg_index i WHERE i.indrelid = to_regclass($1) AND i.indisunique AND i.indisvalid AND i.indpred IS NULL AND i.indnkeyatts = 2
		AND ARRAY(SELECT attname::text FROM pg_attribute WHERE attrelid = i.indrelid AND attnum = ANY(i.indkey) ORDER BY 1) = '{consumer,message_id}')
		WHERE to_regclass($1) IS NOT NULL`, name).Scan(&insertable, &unique)
	if errors.Is(err, pgx.ErrNoRows) {
		return []inbox.Finding{{Component: component, Problem: "table " + schema.Table + " does not exist", Mend: "call inboxpgx.Migrate"}}, nil
	}
	if err != nil {
		return nil, err
	}
	var findings []inbox.Finding
	if !unique {
		findings = append(findings, inbox.Finding{
			Component: component, Problem: "table " + schema.Table + " has no unique index on (consumer, message_id): duplicates are not recognised",
			Mend: "ALTER TABLE " + name + " ADD PRIMARY KEY (consumer, message_id)",
		})
	}
	if !insertable {
		findings = append(findings, inbox.Finding{
			Component: component, Problem: "no right to insert into table " + schema.Table, Mend: "GRANT INSERT ON " + name + " TO the consumer's role",
		})
	}
	attempts, err := schema.attempts()
	if err != nil {
		return nil, err
	}
	var noLedger bool
	if err := conn.QueryRow(ctx, `SELECT to_regclass($1) IS NULL`, attempts).Scan(&noLedger); err != nil {
		return nil, err
	}
	if noLedger {
		findings = append(findings, inbox.Finding{
			Component: component, Problem: "table " + schema.Table + attemptsSuffix + " of the Ledger does not exist", Mend: "call inboxpgx.Migrate",
		})
	}
	return appendUnpruned(ctx, conn, cfg, name, schema.Table, findings)
}

func appendUnpruned(ctx context.Context, conn *pgxpool.Conn, cfg PruneConfig, name, table string, findings []inbox.Finding) ([]inbox.Finding, error) {
	var overdue bool
	err := conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM `+name+` WHERE processed_at < now() - $1::interval)`, cfg.Retention+pruneGrace).Scan(&overdue)
	var answer *pgconn.PgError
	if errors.As(err, &answer) && answer.Code == "42501" {
		return findings, nil // this role may insert only; then another one prunes
	}
	if err != nil {
		return nil, err
	}
	if overdue {
		findings = append(findings, inbox.Finding{
			Component: component, Problem: fmt.Sprintf("table %s holds entries more than a day older than the retention of %v", table, cfg.Retention),
			Mend: "call inboxpgx.Prune regularly",
		})
	}
	return findings, nil
}
