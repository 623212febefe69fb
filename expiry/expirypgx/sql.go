package expirypgx

import (
	"errors"
	"strconv"
	"strings"

	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/internal/sqlident"
)

// statements are the SQL of one table.
type statements struct {
	claim      string   // $1 ids to leave alone
	claimAfter string   // the same, $2 deadline and $3 id after which to start
	claimOnly  string   // $1 the only ids
	expire     string   // returns how many rows have another status now. $1 ids
	still      string   // how many are active and due. $1 ids
	look       string   // $1 ids to leave alone
	overdue    string   // $1 for how many microseconds at least, $2 limit
	plans      []string // what claim reads, without its locks: all active rows, and those that meet Where
	fits       string   // fails if the column cannot hold either status
	nulls      string   // how many active rows can never expire, and one of them
	index      string   // the index that serves them all
	alter      string   // the deadline's type, mended
	notNull    string   // active rows without a deadline, mended
}

func newStatements(name string, c Config) (statements, error) {
	var errs []error
	quote := func(name string) string {
		quoted, err := sqlident.Quote(name)
		errs = append(errs, err)
		return quoted
	}
	value := func(s string) string {
		quoted, err := literal(s)
		errs = append(errs, err)
		return quoted
	}
	table, err := sqlident.Qualify(c.Schema, name)
	errs = append(errs, err)
	id, deadline, status := quote(c.ID), quote(c.Deadline), quote(c.Status)
	columns := id + "::text, " + deadline + ", now()"
	for _, name := range c.Columns {
		columns += ", " + quote(name) + "::text"
	}
	held := status + " = " + value(c.Active)
	active := held
	if c.Where != "" {
		active += " AND (" + c.Where + "\n)" // which may end in a comment
	}
	undated := "FROM " + table + " WHERE " + active + " AND " + deadline + " IS NULL"
	most := strconv.Itoa(driver.MaxOverdue)
	due := active + " AND " + deadline + " <= now()"
	order := " ORDER BY " + deadline + ", " + id

	update := "UPDATE " + table + " SET " + status + " = " + value(c.Expired)
	claim := func(condition string) string {
		return "SELECT " + columns + " FROM " + table + " WHERE " + due + " AND " + condition + order + " LIMIT "
	}
	earliest := "(SELECT min(" + deadline + ") FROM " + table + " WHERE " + active

	explain := func(condition string) string {
		return "EXPLAIN (FORMAT JSON) SELECT " + columns + " FROM " + table + " WHERE " + condition + " AND " + deadline + " <= now()" + order + " LIMIT 200"
	}

	s := statements{
		claim:      claim(id + " <> ALL($1)"),
		claimAfter: claim("(" + deadline + ", " + id + ") > ($2, $3) AND " + id + " <> ALL($1)"),
		claimOnly:  claim(id + " = ANY($1)"),
		expire: "WITH put AS (" + update + " WHERE " + id + " = ANY($1) AND " + due + " RETURNING " + held + " AS held) " +
			"SELECT count(*) FILTER (WHERE NOT held) FROM put",
		still: "SELECT count(*) FROM " + table + " WHERE " + id + " = ANY($1) AND " + due,
		look: "SELECT clock_timestamp(), " + earliest + "), " + earliest + " AND " + id + " <> ALL($1)), " +
			"(SELECT count(*) FROM (SELECT FROM " + table + " WHERE " + due + " LIMIT " + most + ") overdue), " +
			"(SELECT count(*) FROM (SELECT " + undated + " LIMIT " + most + ") undated)",
		overdue: "SELECT " + columns + " FROM " + table + " WHERE " + active + " AND " + deadline +
			" <= now() - $1::bigint * interval '1 microsecond'" + order + " LIMIT $2",
		plans:   []string{explain(held), explain(active)},
		fits:    "EXPLAIN " + update + " WHERE false AND " + held,
		nulls:   "SELECT count(*), coalesce(min(id::text), '') FROM (SELECT " + id + " AS id " + undated + " LIMIT " + most + ") undated",
		index:   "CREATE INDEX CONCURRENTLY ON " + table + " (" + deadline + ", " + id + ") WHERE " + held,
		alter:   "ALTER TABLE " + table + " ALTER " + deadline + " TYPE timestamptz USING " + deadline + " AT TIME ZONE 'UTC'",
		notNull: "UPDATE " + table + " SET " + deadline + " = 'infinity' WHERE " + active + " AND " + deadline + " IS NULL; ALTER TABLE " + table + " ALTER " + deadline + " SET NOT NULL",
	}
	return s, errors.Join(errs...)
}

// limited completes a claim. The limit stands in the statement rather than in a
// parameter, whose value the planner would want to see each time anew; a sweeper
// halves and doubles one number, so there are few of these.
func limited(claim string, limit int) string {
	return claim + strconv.Itoa(limit) + " FOR UPDATE SKIP LOCKED"
}

var escape = strings.NewReplacer(`\`, `\\`, `"`, `\"`)

// array is ids as the text of a Postgres array, which the server reads as an
// array of whatever type the column has.
func array(ids []string) string {
	var b strings.Builder
	b.WriteByte('{')
	for i, id := range ids {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteByte('"')
		b.WriteString(escape.Replace(id))
		b.WriteByte('"')
	}
	b.WriteByte('}')
	return b.String()
}
