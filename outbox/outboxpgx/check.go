package outboxpgx

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// Finding is one thing that is missing or mis-set on the server.
type Finding = check.Finding

const mendMigrate = "call outboxpgx.Migrate, or apply the files of outboxpgx.Migrations"

// Check compares the server with what the outbox needs: tables, columns, indexes and lanes;
// autovacuum, and nothing that keeps it from its work for more than 10 minutes; and a clock that
// agrees with this host's to a second. A pooler in transaction mode does a Source no harm: see
// Listener.Check. No findings means that all is well; an error, that it could not look.
func (s *Source) Check(ctx context.Context) ([]Finding, error) {
	var findings []Finding
	err := pgcall.Twice(ctx, s.pool, checkTimeout, func(ctx context.Context, conn *pgxpool.Conn) error {
		findings = nil
		return s.check(ctx, conn, func(mend, format string, args ...any) {
			findings = append(findings, Finding{Component: "outboxpgx", Problem: fmt.Sprintf(format, args...), Mend: mend})
		})
	})
	if err != nil {
		return findings, fmt.Errorf("outboxpgx: check: %w", err)
	}
	return findings, nil
}

// checkTimeout bounds all queries of a Check together.
const checkTimeout = 10 * time.Second

func (s *Source) check(ctx context.Context, conn *pgxpool.Conn, add addFinding) error {
	complete, err := s.checkColumns(ctx, conn, add)
	if err != nil || !complete {
		return err // the rest would fail
	}
	table := SchemaConfig{Table: s.cfg.Table}.withDefaults().Table
	if err := s.checkIndexes(ctx, conn, table, add); err != nil {
		return err
	}
	if err := s.checkLanes(ctx, conn, add); err != nil {
		return err
	}
	return s.checkServer(ctx, conn, add)
}

func (s *Source) checkLanes(ctx context.Context, conn *pgxpool.Conn, add addFinding) error {
	var lanes int
	err := conn.QueryRow(ctx, `SELECT count(*) FROM `+s.t.lanes+` WHERE lane >= 0 AND lane < $1`, driver.Lanes).Scan(&lanes)
	if err != nil {
		return err
	}
	if lanes != driver.Lanes {
		add(fmt.Sprintf("INSERT INTO %s (lane) SELECT generate_series(0, %d) ON CONFLICT DO NOTHING", s.t.lanes, driver.Lanes-1),
			"table %s has %d of %d lanes; messages of the others are never published", s.t.lanes, lanes, driver.Lanes)
	}
	return nil
}

// checkColumns returns whether all are there.
func (s *Source) checkColumns(ctx context.Context, conn *pgxpool.Conn, add addFinding) (complete bool, err error) {
	complete = true
	for suffix, table := range map[string]string{"": s.t.outbox, "_lanes": s.t.lanes, "_dead": s.t.dead, "_audit": s.t.audit, "_dedup": s.t.dedup} {
		missing, err := s.missingColumns(ctx, conn, table, wanted[suffix])
		if err != nil {
			return false, err
		}
		if len(missing) > 0 {
			complete = false
			add(mendMigrate, "table %s lacks the columns %v", table, missing)
		}
	}
	return complete, nil
}

// wanted are the columns by the suffix of the table's name.
var wanted = map[string][]string{
	"": {
		"id", "seq", "lane", "name", "body", "content_type", "headers", "ordering_key", "transport_name", "exchange", "routing_key",
		"route_headers", "created_at", "published_at", "due_at", "held", "attempts", "error_class", "last_error",
	},
	"_lanes": {"lane", "token", "lease_until", "floor", "batch", "suspect", "alone", "losses", "era"},
	"_dead": {
		"id", "seq", "lane", "name", "body", "content_type", "headers", "ordering_key", "transport_name", "exchange", "routing_key",
		"route_headers", "created_at", "attempts", "error_class", "last_error", "died_at",
	},
	"_audit": {"id", "at", "actor", "reason", "action", "count", "filter", "destination"},
	"_dedup": {"key", "id", "expires_at"},
}

// missingColumns returns the columns that the table lacks: all, if there is no such table.
func (s *Source) missingColumns(ctx context.Context, conn *pgxpool.Conn, qualified string, columns []string) ([]string, error) {
	rows, _ := conn.Query(ctx, `
		SELECT c FROM unnest($2::text[]) AS c
		WHERE NOT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = to_regclass($1) AND a.attname = c AND a.attnum > 0 AND NOT a.attisdropped)`,
		qualified, columns)
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

func (s *Source) checkIndexes(ctx context.Context, conn *pgxpool.Conn, table string, add addFinding) error {
	indexes := map[string]string{
		"_pkey": s.t.outbox, "_ready": s.t.outbox, "_parked": s.t.outbox, "_held": s.t.outbox, "_published": s.t.outbox,
		"_lanes_pkey": s.t.lanes, "_dead_pkey": s.t.dead, "_dead_died": s.t.dead, "_audit_pkey": s.t.audit, "_audit_at": s.t.audit,
		"_dedup_pkey": s.t.dedup, "_dedup_expires": s.t.dedup,
	}
	for suffix, on := range indexes {
		var valid bool
		err := conn.QueryRow(ctx, `
			SELECT coalesce(bool_or(i.indisvalid), false) FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
			WHERE i.indrelid = to_regclass($1) AND c.relname = $2`, on, table+suffix).Scan(&valid)
		if err != nil {
			return err
		}
		if !valid {
			add("create the index as in the files of outboxpgx.Migrations", "index %s is missing or invalid", table+suffix)
		}
	}
	return nil
}
