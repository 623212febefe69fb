package expirypgx

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/internal/pgcall"
)

// Check reports what is missing or wrong about the table: the table itself, its
// columns, the deadline's type, a status the column cannot hold, active rows
// without a deadline, the index, and a Config.Claim that the server refuses or
// whose parameters are others. Empty means that all is well. The error says that
// it could not look, which takes 5 s at most. Nothing is changed, and Config.Claim
// is not run.
func (s *Store) Check(ctx context.Context) (found []expiry.Finding, err error) {
	err = pgcall.Within(ctx, s.pool, checkTimeout, func(ctx context.Context, conn *pgxpool.Conn) (err error) {
		found, err = s.check(ctx, conn.Conn())
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("expirypgx: check: %w", err)
	}
	return found, nil
}

const checkTimeout = 5 * time.Second

func (s *Store) check(ctx context.Context, conn *pgx.Conn) ([]expiry.Finding, error) {
	types, err := s.columnTypes(ctx, conn)
	if err != nil {
		return nil, err
	}
	if types == nil {
		return []expiry.Finding{finding("table "+s.table()+" does not exist", "create it, or correct Config.Schema and Config.Table")}, nil
	}
	if missing := s.checkColumns(types); len(missing) > 0 {
		return missing, nil
	}
	rows, err := s.checkRows(ctx, conn)
	if err != nil {
		return nil, err
	}
	claim, err := s.checkClaim(ctx, conn)
	return slices.Concat(rows, claim), err
}

func finding(problem, mend string) expiry.Finding {
	return expiry.Finding{Component: "expirypgx", Problem: problem, Mend: mend}
}

func (s *Store) table() string {
	if s.cfg.Schema == "" {
		return s.cfg.Table
	}
	return s.cfg.Schema + "." + s.cfg.Table
}

const columnTypesSQL = `
SELECT a.attname::text, format_type(coalesce(nullif(t.typbasetype, 0), t.oid), NULL)
FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
WHERE a.attrelid = to_regclass($1) AND a.attnum > 0 AND NOT a.attisdropped`

// columnTypes returns the type of every column, of a domain the one below, or nil if there is no table.
func (s *Store) columnTypes(ctx context.Context, conn *pgx.Conn) (map[string]string, error) {
	name := pgx.Identifier{s.cfg.Table}
	if s.cfg.Schema != "" {
		name = pgx.Identifier{s.cfg.Schema, s.cfg.Table}
	}
	rows, err := conn.Query(ctx, columnTypesSQL, name.Sanitize())
	if err != nil {
		return nil, err
	}
	var types map[string]string
	var column, typ string
	_, err = pgx.ForEachRow(rows, []any{&column, &typ}, func() error {
		if types == nil {
			types = map[string]string{}
		}
		types[column] = typ
		return nil
	})
	return types, err
}

func (s *Store) checkColumns(types map[string]string) []expiry.Finding {
	var found []expiry.Finding
	for _, name := range slices.Concat([]string{s.cfg.ID, s.cfg.Deadline, s.cfg.Status}, s.cfg.Columns) {
		if _, ok := types[name]; !ok {
			found = append(found, finding(fmt.Sprintf("table %s has no column %q", s.table(), name), "add it, or correct Config"))
		}
	}
	if typ, ok := types[s.cfg.Deadline]; ok && typ != "timestamp with time zone" {
		found = append(found, finding(fmt.Sprintf("column %q of %s is %s, not timestamptz", s.cfg.Deadline, s.table(), typ), s.sql.alter))
	}
	return found
}

// checkRows asks the planner whether the claim is served by an index, and looks
// for active rows that can never expire.
func (s *Store) checkRows(ctx context.Context, conn *pgx.Conn) (found []expiry.Finding, err error) {
	var statusErr error
	err = pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		if _, statusErr = tx.Exec(ctx, s.sql.fits); statusErr != nil {
			return statusErr
		}
		served, err := s.served(ctx, tx)
		if err != nil {
			return err
		}
		if !served {
			found = append(found, finding("no index serves the search for due rows in "+s.table(), s.sql.index))
		}
		undated, err := s.undated(ctx, tx)
		found = append(found, undated...)
		return err
	})
	var pg *pgconn.PgError
	if errors.As(statusErr, &pg) && (strings.HasPrefix(pg.Code, "22") || pg.Code == "42883") {
		return []expiry.Finding{finding(fmt.Sprintf("column %q of %s cannot hold both %q and %q: %s", s.cfg.Status, s.table(), s.cfg.Active, s.cfg.Expired, pg.Message),
			"correct Config.Status, Config.Active and Config.Expired")}, nil
	}
	return found, err
}

// undated looks for active rows that can never expire.
func (s *Store) undated(ctx context.Context, tx pgx.Tx) ([]expiry.Finding, error) {
	var rows int
	var example string
	if err := tx.QueryRow(ctx, s.sql.nulls).Scan(&rows, &example); err != nil || rows == 0 {
		return nil, err
	}
	several := strconv.Itoa(rows)
	if rows == driver.MaxOverdue {
		several += " or more"
	}
	return []expiry.Finding{finding(
		fmt.Sprintf("%s active rows of %s have no deadline and never expire, such as the one with the id %q", several, s.table(), example),
		fmt.Sprintf("give them one, or if they are never to expire: %s; or leave them out by Config.Where: %q IS NOT NULL", s.sql.notNull, s.cfg.Deadline),
	)}, nil
}

// served reports whether an index serves the claim, be it one of all active rows
// or of those that meet Where.
func (s *Store) served(ctx context.Context, tx pgx.Tx) (bool, error) {
	const noDetours = `SELECT set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true), set_config('enable_sort', 'off', true)`
	if _, err := tx.Exec(ctx, noDetours); err != nil {
		return false, err
	}
	for _, explain := range s.sql.plans {
		var answer []byte
		if err := tx.QueryRow(ctx, explain).Scan(&answer); err != nil {
			return false, err
		}
		served, err := s.servedByIndex(answer)
		if served || err != nil {
			return served, err
		}
	}
	return false, nil
}

// plan is one node of EXPLAIN's JSON.
type plan struct {
	Type   string `json:"Node Type"`
	Filter string `json:"Filter"`
	Cond   string `json:"Index Cond"`
	Plans  []plan `json:"Plans"`
}

// servedByIndex reports whether the plan reads rows in order from an index that
// holds the active ones only, or together.
func (s *Store) servedByIndex(explained []byte) (bool, error) {
	var answer []struct{ Plan plan }
	if err := json.Unmarshal(explained, &answer); err != nil {
		return false, fmt.Errorf("unexpected answer of EXPLAIN: %w", err)
	}
	if len(answer) != 1 {
		return false, fmt.Errorf("unexpected answer of EXPLAIN: %d plans", len(answer))
	}
	return answer[0].Plan.served(s.cfg), nil
}

func (p plan) served(c Config) bool {
	if p.Type == "Seq Scan" || p.Type == "Sort" || strings.Contains(p.Filter, c.Status) {
		return false
	}
	// Conditions stand in the order of the index: a status behind the deadline
	// leaves the rows of other states in between.
	if at := strings.Index(p.Cond, c.Deadline); at >= 0 && strings.Index(p.Cond, c.Status) > at {
		return false
	}
	for _, child := range p.Plans {
		if !child.served(c) {
			return false
		}
	}
	return true
}
