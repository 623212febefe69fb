package outboxpgx

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/internal/pgcheck"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

const mendMigrate = "call Migrate, or apply the files of Schema"

// Check compares the server with what the outbox needs: tables, columns, indexes, lanes and functions;
// no trigger, rule or row-level security that drops changes of its tables; autovacuum, and nothing that keeps it from its work for more than 10 minutes; a clock that agrees
// with this host's to a second; and, unless Config.PollOnly is set, notifications that arrive. It
// returns nil where nothing is to be mended. Else Unwrap() []error of the error gives each finding,
// which has a method Mend() string, and why it could not look, which has none.
func (s *Store) Check(ctx context.Context) error {
	var found check.Findings
	var complete bool
	err := pgcall.Twice(ctx, s.pool, checkTimeout, func(ctx context.Context, conn *pgxpool.Conn) (err error) {
		found = check.Findings{Component: "outboxpgx"}
		complete, err = s.check(ctx, conn, &found)
		return err
	})
	if err == nil && complete {
		err = s.checkWakeUps(ctx, &found)
	}
	if err != nil {
		found.Join(fmt.Errorf("outboxpgx: check: %w", err))
	}
	return found.Err()
}

// checkTimeout bounds the queries of one try together, without the test of notifications.
const checkTimeout = 10 * time.Second

// check returns whether the table is complete. If it is not, other looks would fail.
func (s *Store) check(ctx context.Context, conn *pgxpool.Conn, found *check.Findings) (complete bool, err error) {
	if err := pgcheck.Settings(ctx, conn, found); err != nil {
		return false, err
	}
	complete, err = s.checkColumns(ctx, conn, found)
	if err != nil || !complete {
		return false, err
	}
	if err := s.checkIndexes(ctx, conn, found); err != nil {
		return false, err
	}
	if err := s.checkLanes(ctx, conn, found); err != nil {
		return false, err
	}
	if err := s.checkFunctions(ctx, conn, found); err != nil {
		return false, err
	}
	if err := pgcheck.Drops(ctx, conn, found, s.t.outbox, s.t.lanes, s.t.dead, s.t.audit, s.t.pause, s.t.dedup); err != nil {
		return false, err
	}
	return true, s.checkServer(ctx, conn, found)
}

func (s *Store) checkLanes(ctx context.Context, conn *pgxpool.Conn, found *check.Findings) error {
	var lanes int
	err := conn.QueryRow(ctx, `SELECT count(*) FROM `+s.t.lanes+` WHERE lane >= 0 AND lane < $1`, driver.Lanes).Scan(&lanes)
	if err != nil {
		return err
	}
	if lanes != driver.Lanes {
		found.Add(fmt.Sprintf("INSERT INTO %s (lane) SELECT generate_series(0, %d) ON CONFLICT DO NOTHING", s.t.lanes, driver.Lanes-1),
			"table %s has %d of %d lanes; messages of the others are never published", s.t.lanes, lanes, driver.Lanes)
	}
	return nil
}

func (s *Store) checkFunctions(ctx context.Context, conn *pgxpool.Conn, found *check.Findings) error {
	for _, function := range []string{s.t.write, s.t.claim, s.t.settle, s.t.record, s.t.look, s.t.ignored} {
		var exists bool
		if err := conn.QueryRow(ctx, `SELECT to_regproc($1) IS NOT NULL`, function).Scan(&exists); err != nil {
			return err
		}
		if !exists {
			found.Add(mendMigrate, "function %s does not exist", function)
		}
	}
	return nil
}

// checkColumns returns whether all are there.
func (s *Store) checkColumns(ctx context.Context, conn *pgxpool.Conn, found *check.Findings) (complete bool, err error) {
	complete = true
	for suffix, table := range map[string]string{"": s.t.outbox, "_lanes": s.t.lanes, "_dead": s.t.dead, "_audit": s.t.audit, "_pause": s.t.pause, "_dedup": s.t.dedup} {
		missing, err := s.missingColumns(ctx, conn, table, wanted[suffix])
		if err != nil {
			return false, err
		}
		if len(missing) == len(wanted[suffix]) {
			complete = false
			found.Add(mendMigrate, "table %s does not exist", table)
		} else if len(missing) > 0 {
			complete = false
			found.Add(mendMigrate, "table %s lacks the columns %v", table, missing)
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
		"route_headers", "created_at", "attempts", "error_class", "last_error", "died_at", "fingerprint",
	},
	"_audit": {"id", "at", "actor", "reason", "action", "count", "filter"},
	"_pause": {"part", "actor", "reason", "since"},
	"_dedup": {"key", "id", "expires_at"},
}

// missingColumns returns the columns that the table lacks: all, if there is no such table.
func (s *Store) missingColumns(ctx context.Context, conn *pgxpool.Conn, qualified string, columns []string) ([]string, error) {
	rows, _ := conn.Query(ctx, `
		SELECT c FROM unnest($2::text[]) AS c
		WHERE NOT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = to_regclass($1) AND a.attname = c AND a.attnum > 0 AND NOT a.attisdropped)`,
		qualified, columns)
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

func (s *Store) checkIndexes(ctx context.Context, conn *pgxpool.Conn, found *check.Findings) error {
	indexes := map[string]string{
		"_pkey": s.t.outbox, "_ready": s.t.outbox, "_parked": s.t.outbox, "_held": s.t.outbox, "_published": s.t.outbox,
		"_lanes_pkey": s.t.lanes, "_dead_pkey": s.t.dead, "_dead_died": s.t.dead, "_audit_pkey": s.t.audit, "_audit_at": s.t.audit,
		"_pause_pkey": s.t.pause, "_dedup_pkey": s.t.dedup, "_dedup_expires": s.t.dedup,
	}
	for suffix, on := range indexes {
		var valid bool
		err := conn.QueryRow(ctx, `
			SELECT coalesce(bool_or(i.indisvalid), false) FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
			WHERE i.indrelid = to_regclass($1) AND c.relname = $2`, on, s.cfg.Table+suffix).Scan(&valid)
		if err != nil {
			return err
		}
		if !valid {
			found.Add("create the index as in the files of Schema", "index %s is missing or invalid", s.cfg.Table+suffix)
		}
	}
	return nil
}
