// Package pgcheck finds what can make Postgres drop a change of a row without an error. All Checks of stores on
// Postgres share it.
package pgcheck

import (
	"context"
	"fmt"
	"regexp"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/check"
)

// Querier is a connection, a pool or a transaction.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// Drops adds a finding for each trigger, rule, inheritance and row-level security by which Postgres may drop or hide
// a row of the tables that the statements of the current role insert, update or delete. It also looks at the partitions of
// the tables. The names are qualified and quoted. A table that does not exist has no finding.
//
// Not every BEFORE trigger is a fault. Drops reads the source of the trigger's function and reports a function that
// may return NULL, or the wrong row. It does not report a function in C, which has no source.
func Drops(ctx context.Context, q Querier, found *check.Findings, tables ...string) error {
	for _, look := range []func(context.Context, Querier, *check.Findings, []string) error{triggers, rules, children, hidden} {
		if err := look(ctx, q, found, tables); err != nil {
			return err
		}
	}
	return nil
}

// everySQL returns the tables of $1, each with its partitions and the tables that inherit from it.
const everySQL = `
WITH RECURSIVE every (oid) AS (
  SELECT to_regclass(name)::oid FROM unnest($1::text[]) AS name WHERE to_regclass(name) IS NOT NULL
  UNION SELECT i.inhrelid FROM pg_inherits i JOIN every e ON i.inhparent = e.oid)`

// triggersSQL returns the enabled row triggers that run before a change, or instead of it.
const triggersSQL = everySQL + `
SELECT t.tgrelid::regclass::text, quote_ident(t.tgname), t.tgfoid::regproc::text, l.lanname::text, p.prosrc, (t.tgtype & 20) <> 0, (t.tgtype & 8) <> 0
FROM every e JOIN pg_trigger t ON t.tgrelid = e.oid JOIN pg_proc p ON p.oid = t.tgfoid JOIN pg_language l ON l.oid = p.prolang
WHERE NOT t.tgisinternal AND t.tgenabled IN ('O', 'A') AND (t.tgtype & 1) <> 0 AND (t.tgtype & 66) <> 0
ORDER BY 1, 2`

func triggers(ctx context.Context, q Querier, found *check.Findings, tables []string) error {
	var table, name, function string
	var f body
	rows, _ := q.Query(ctx, triggersSQL, tables) // ForEachRow returns its error
	_, err := pgx.ForEachRow(rows, []any{&table, &name, &function, &f.language, &f.source, &f.writes, &f.deletes}, func() error {
		if why := f.drops(); why != "" {
			found.Add(fmt.Sprintf("correct function %s, or DROP TRIGGER %s ON %s", function, name, table),
				"trigger %s of table %s may drop changes without an error: %s", name, table, why)
		}
		return nil
	})
	return err
}

// rulesSQL returns the enabled rules that replace a change.
const rulesSQL = everySQL + `
SELECT r.ev_class::regclass::text, quote_ident(r.rulename) FROM every e JOIN pg_rewrite r ON r.ev_class = e.oid
WHERE r.is_instead AND r.ev_type <> '1' AND r.ev_enabled IN ('O', 'A') ORDER BY 1, 2`

func rules(ctx context.Context, q Querier, found *check.Findings, tables []string) error {
	return pairs(ctx, q, rulesSQL, tables, func(table, name string) {
		found.Add(fmt.Sprintf("DROP RULE %s ON %s", name, table), "rule %s of table %s replaces changes of its rows", name, table)
	})
}

// childrenSQL returns tables that inherit from one that is not partitioned by Postgres itself.
const childrenSQL = everySQL + `
SELECT DISTINCT ON (1) i.inhparent::regclass::text, i.inhrelid::regclass::text
FROM every e JOIN pg_class c ON c.oid = e.oid AND c.relkind = 'r' JOIN pg_inherits i ON i.inhparent = c.oid ORDER BY 1, 2`

func children(ctx context.Context, q Querier, found *check.Findings, tables []string) error {
	return pairs(ctx, q, childrenSQL, tables, func(table, child string) {
		found.Add(fmt.Sprintf("move the rows to table %s and drop the tables that inherit from it", table),
			"table %s is partitioned by inheritance (%s): a row there is in no unique index of the table", table, child)
	})
}

// policiesSQL returns the tables whose row security limits the current role. A table is left out if a policy lets the
// role do everything with every row and no restrictive policy exists.
const policiesSQL = everySQL + `
SELECT e.oid::regclass::text, quote_ident(current_user) FROM every e
WHERE row_security_active(e.oid) AND (
  EXISTS (SELECT FROM pg_policy p WHERE p.polrelid = e.oid AND NOT p.polpermissive)
  OR NOT EXISTS (
    SELECT FROM pg_policy p WHERE p.polrelid = e.oid AND p.polpermissive AND p.polcmd = '*' AND pg_get_expr(p.polqual, p.polrelid) = 'true'
      AND coalesce(pg_get_expr(p.polwithcheck, p.polrelid), 'true') = 'true'
      AND EXISTS (SELECT FROM unnest(p.polroles) AS r WHERE r = 0 OR pg_has_role(r, 'USAGE'))))
ORDER BY 1`

// Hidden adds the findings of Drops about row-level security alone: the current role does not see rows of the table.
func Hidden(ctx context.Context, q Querier, found *check.Findings, tables ...string) error {
	return hidden(ctx, q, found, tables)
}

func hidden(ctx context.Context, q Querier, found *check.Findings, tables []string) error {
	return pairs(ctx, q, policiesSQL, tables, func(table, role string) {
		found.Add(fmt.Sprintf("CREATE POLICY holdfast ON %s TO %s USING (true), or ALTER ROLE %[2]s BYPASSRLS", table, role),
			"row-level security of table %s hides rows from role %s and drops its changes", table, role)
	})
}

// pairs calls add with each row of two names.
func pairs(ctx context.Context, q Querier, sql string, tables []string, add func(a, b string)) error {
	var a, b string
	rows, _ := q.Query(ctx, sql, tables) // ForEachRow returns its error
	_, err := pgx.ForEachRow(rows, []any{&a, &b}, func() error {
		add(a, b)
		return nil
	})
	return err
}

// body is the function of a trigger, and the changes for which the trigger runs.
type body struct {
	language, source string
	writes, deletes  bool
}

var (
	// noise matches comments and texts, which are not code.
	noise = regexp.MustCompile(`(?s)--[^\n]*|/\*.*?\*/|'(?:[^']|'')*'`)
	// returned finds the expressions that a function in PL/pgSQL returns.
	returned = regexp.MustCompile(`(?is)\breturn\b\s*([^;]*?)\s*;`)
	// skips matches the words by which other languages drop a row.
	skips = regexp.MustCompile(`(?i)\b(skip|null|none)\b`)
)

// drops returns why the function may drop a change, or "".
//
// A row trigger drops the change of a row by returning NULL. NEW is NULL in a trigger for DELETE, and OLD is NULL in one
// for INSERT. A trigger for UPDATE that returns OLD undoes the change, and the row still counts as changed.
func (b body) drops() string {
	switch b.language {
	case "plpgsql":
		return b.dropsPLpgSQL()
	case "internal":
		if strings.TrimSpace(b.source) == "suppress_redundant_updates_trigger" {
			return "it drops an UPDATE that changes nothing"
		}
		return ""
	case "c":
		return ""
	}
	if word := skips.FindString(b.source); word != "" {
		return "its function contains " + word
	}
	return ""
}

func (b body) dropsPLpgSQL() string {
	var old, fresh bool
	for _, found := range returned.FindAllStringSubmatch(noise.ReplaceAllString(b.source, " "), -1) {
		switch expression := strings.ToLower(strings.Join(strings.Fields(found[1]), "")); strings.Trim(expression, "()") {
		case "new":
			fresh = true
		case "old":
			old = true
		case "coalesce(new,old", "coalesce(old,new":
			old, fresh = true, true
		default:
			return "its function may return " + found[1]
		}
	}
	switch {
	case b.writes && !fresh:
		return "its function does not return NEW"
	case b.deletes && !old:
		return "it runs for DELETE and its function does not return OLD"
	}
	return ""
}

// Settings adds a finding for each setting of the connection with which pgx misreads values. Two of them matter only in the
// exec modes that read values as text, exec and simple_protocol.
func Settings(ctx context.Context, conn *pgxpool.Conn, found *check.Findings) error {
	var bytea, dates, encoding string
	err := conn.QueryRow(ctx, `SELECT pg_catalog.current_setting('bytea_output'), pg_catalog.current_setting('DateStyle'), pg_catalog.current_setting('client_encoding')`).
		Scan(&bytea, &dates, &encoding)
	if err != nil {
		return err
	}
	if encoding != "UTF8" {
		found.Add("remove client_encoding from the connection string, or ALTER ROLE … SET client_encoding = 'UTF8'",
			"client_encoding is %s: pgx reads and writes UTF8", encoding)
	}
	mode := conn.Conn().Config().DefaultQueryExecMode
	if mode != pgx.QueryExecModeExec && mode != pgx.QueryExecModeSimpleProtocol {
		return nil
	}
	if bytea != "hex" {
		found.Add("ALTER ROLE … SET bytea_output = 'hex', or use another QueryExecMode",
			"bytea_output is %s: in the exec mode %q pgx cannot read it", bytea, mode)
	}
	if len(dates) < 3 || dates[:3] != "ISO" {
		found.Add("ALTER ROLE … SET DateStyle = 'ISO', or use another QueryExecMode",
			"DateStyle is %s: in the exec mode %q pgx cannot read it", dates, mode)
	}
	return nil
}
