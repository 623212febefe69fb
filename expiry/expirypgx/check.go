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

	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/internal/pgcheck"
	"github.com/holdfast-go/holdfast/internal/pgnotify"
	"github.com/holdfast-go/holdfast/internal/sqlident"
)

// Check returns all problems, or nil: those found by Fit; triggers, rules and row-level security that drop changes of
// the table or hide rows; and notifications that do not arrive on a connection of the pool, unless PollOnly is set.
// Findings are joined; each has a method Fix() string with the fix. Any other error in it means that the database
// could not be read. Check changes nothing.
func (s *Store) Check(ctx context.Context) error {
	err := s.Fit(ctx)
	if errors.Is(err, pgcall.ErrSilent) { // another connection may answer
		err = s.Fit(ctx)
	}
	if err != nil {
		return err
	}
	found, err := s.checkDrops(ctx)
	found.Join(err)
	found.Join(s.checkWakeUps(ctx))
	return found.Err()
}

// checkDrops is not part of Fit, because a trigger that may drop a change is no reason to stop sweeping.
func (s *Store) checkDrops(ctx context.Context) (found check.Findings, err error) {
	err = pgcall.Twice(ctx, s.pool, checkTimeout, func(ctx context.Context, conn *pgxpool.Conn) error {
		found = check.Findings{Component: "expirypgx"}
		if err := pgcheck.Settings(ctx, conn, &found); err != nil {
			return err
		}
		return pgcheck.Drops(ctx, conn, &found, s.qualified())
	})
	if err != nil {
		return found, fmt.Errorf("expirypgx: check: %w", err)
	}
	return found, nil
}

func (s *Store) checkWakeUps(ctx context.Context) error {
	if s.cfg.PollOnly {
		return nil
	}
	switch err := s.listener.Probe(ctx); {
	case err == nil:
		return nil
	case errors.Is(err, pgnotify.ErrSwallowed):
		return finding("notifications do not arrive, so that sweepers find rows of other processes only by polling",
			"connect the manager's pool to Postgres or to a pooler in session mode, or set Config.PollOnly")
	default:
		return fmt.Errorf("expirypgx: check: %w", err)
	}
}

// Fit implements expiry/driver.Fit. It checks everything that a sweeper needs: the table itself, its columns, the
// deadline's type, a status that the column can hold, active rows without a deadline, and the index. It takes at most
// 5 s.
func (s *Store) Fit(ctx context.Context) error {
	var findings error
	err := pgcall.Within(ctx, s.pool, checkTimeout, func(ctx context.Context, conn *pgxpool.Conn) (err error) {
		findings, err = s.fit(ctx, conn.Conn())
		return err
	})
	if err != nil {
		return fmt.Errorf("expirypgx: check: %w", err)
	}
	return findings
}

const checkTimeout = 5 * time.Second

func (s *Store) fit(ctx context.Context, conn *pgx.Conn) (findings, err error) {
	types, err := s.columnTypes(ctx, conn)
	if err != nil {
		return nil, err
	}
	if types == nil {
		return finding("table "+s.table()+" does not exist", "create it, or fix its name or Config.Schema"), nil
	}
	if missing := s.checkColumns(types); missing != nil {
		return missing, nil
	}
	return s.checkRows(ctx, conn)
}

func finding(problem, fix string) error { return check.New("expirypgx", problem, fix) }

func (s *Store) table() string {
	if s.cfg.Schema == "" {
		return s.name
	}
	return s.cfg.Schema + "." + s.name
}

// qualified returns the quoted name of the table.
func (s *Store) qualified() string {
	if s.cfg.Schema == "" {
		return pgx.Identifier{s.name}.Sanitize()
	}
	return pgx.Identifier{s.cfg.Schema, s.name}.Sanitize()
}

const columnTypesSQL = `
SELECT a.attname::text, format_type(coalesce(nullif(t.typbasetype, 0), t.oid), NULL)
FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
WHERE a.attrelid = to_regclass($1) AND a.attnum > 0 AND NOT a.attisdropped`

// columnTypes returns the type of every column (of a domain its base type), or nil if there is no table.
func (s *Store) columnTypes(ctx context.Context, conn *pgx.Conn) (map[string]string, error) {
	rows, err := conn.Query(ctx, columnTypesSQL, s.qualified())
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

func (s *Store) checkColumns(types map[string]string) error {
	found := check.Findings{Component: "expirypgx"}
	for _, name := range slices.Concat([]string{s.cfg.ID, s.cfg.Deadline, s.cfg.Status}, s.cfg.Columns) {
		if _, ok := types[name]; !ok {
			found.Add("add it, or fix Config", "table %s has no column %q", s.table(), name)
		}
	}
	if typ, ok := types[s.cfg.Deadline]; ok && typ != "timestamp with time zone" {
		found.Add(s.sql.alter, "column %q of %s is %s, not timestamptz", s.cfg.Deadline, s.table(), typ)
	}
	return found.Err()
}

// checkRows asks the planner whether an index serves the claim, and finds active rows that can never expire.
func (s *Store) checkRows(ctx context.Context, conn *pgx.Conn) (findings, err error) {
	found := check.Findings{Component: "expirypgx"}
	var statusErr error
	err = pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		if _, statusErr = tx.Exec(ctx, s.sql.fits); statusErr != nil {
			return statusErr
		}
		var hidden check.Findings // the plan of a role that sees no rows has no index; Check reports the reason
		if err := pgcheck.Hidden(ctx, tx, &hidden, s.qualified()); err != nil {
			return err
		}
		served, err := s.served(ctx, tx)
		if err != nil {
			return err
		}
		if !served && hidden.Err() == nil {
			found.Add(s.sql.index, "no index serves the search for due rows in %s", s.table())
		}
		return s.undated(ctx, tx, &found)
	})
	var pg *pgconn.PgError
	if errors.As(statusErr, &pg) && (strings.HasPrefix(pg.Code, "22") || pg.Code == "42883") {
		found.Add("fix Config.Status, Config.Active and Config.Expired",
			"column %q of %s cannot hold both %q and %q: %s", s.cfg.Status, s.table(), s.cfg.Active, s.cfg.Expired, pg.Message)
		return found.Err(), nil
	}
	if err != nil {
		return nil, err
	}
	return found.Err(), nil
}

// undated finds active rows that can never expire.
func (s *Store) undated(ctx context.Context, tx pgx.Tx, found *check.Findings) error {
	var rows int
	var example string
	if err := tx.QueryRow(ctx, s.sql.nulls).Scan(&rows, &example); err != nil || rows == 0 {
		return err
	}
	several := strconv.Itoa(rows)
	if rows == driver.MaxOverdue {
		several += " or more"
	}
	found.Add(
		fmt.Sprintf("set a deadline, or if they must never expire: %s; or exclude them by Config.Where: %q IS NOT NULL", s.sql.notNull, s.cfg.Deadline),
		"%s active rows of %s have no deadline and never expire, such as the one with the id %q", several, s.table(), example)
	return nil
}

// served reports whether an index serves the claim, either an index of all active rows or one of the rows that also
// meet Where.
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

// plan is one node in the JSON of EXPLAIN.
type plan struct {
	Type   string `json:"Node Type"`
	Filter string `json:"Filter"`
	Cond   string `json:"Index Cond"`
	Plans  []plan `json:"Plans"`
}

// servedByIndex reports whether the plan reads rows in order from an index that holds only the active rows, or holds
// them together.
func (s *Store) servedByIndex(explained []byte) (bool, error) {
	var answer []struct{ Plan plan }
	if err := json.Unmarshal(explained, &answer); err != nil {
		return false, fmt.Errorf("unexpected result of EXPLAIN: %w", err)
	}
	if len(answer) != 1 {
		return false, fmt.Errorf("unexpected result of EXPLAIN: %d plans", len(answer))
	}
	return answer[0].Plan.served(s.cfg), nil
}

func (p plan) served(c Config) bool {
	if p.Type == "Seq Scan" || p.Type == "Sort" || strings.Contains(p.Filter, c.Status) {
		return false
	}
	// Conditions are in the order of the index columns: with a status behind the deadline, rows of other states lie
	// in between.
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

// Grants returns the privileges that a database role needs for one job, each as the text between GRANT and TO. The
// job "sweep" is for a sweeper, without the needs of Config.Emit; "operate" is for Look, Overdue and Check. It is nil
// for other jobs.
func (s *Store) Grants(job string) []string {
	table, err := sqlident.Qualify(s.cfg.Schema, s.name)
	if err != nil || job != "sweep" && job != "operate" {
		return nil // New rejects invalid names
	}
	read := "SELECT" // Where may read any column
	if s.cfg.Where == "" {
		read = "SELECT (" + strings.Join(s.readColumns(), ", ") + ")"
	}
	if job == "operate" {
		return sqlident.Granted(s.cfg.Schema, read+" ON "+table)
	}
	return sqlident.Granted(s.cfg.Schema, read+", UPDATE ("+s.readColumns()[2]+") ON "+table)
}

// readColumns returns the columns that statements read. The status is the third.
func (s *Store) readColumns() []string {
	names := append([]string{s.cfg.ID, s.cfg.Deadline, s.cfg.Status}, s.cfg.Columns...)
	for i, name := range names {
		names[i], _ = sqlident.Quote(name) // checked by New
	}
	return names
}
