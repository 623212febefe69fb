package expirypgx_test

import (
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/internal/pgtest"
)

func TestCheck(t *testing.T) {
	t.Parallel()
	const table = "CREATE TABLE holds (id text PRIMARY KEY, expires_at timestamptz, status text, seat text);"
	for name, tc := range map[string]struct{ sql, problem, mend string }{
		"no table":         {"SELECT 1", "does not exist", "create it"},
		"no column":        {"CREATE TABLE holds (id text, status text)", `no column "expires_at"`, "add it"},
		"without zone":     {"CREATE TABLE holds (id text, expires_at timestamp, status text)", "not timestamptz", "TYPE timestamptz"},
		"wrong enum":       {"CREATE TYPE s AS ENUM ('open'); CREATE TABLE holds (id text, expires_at timestamptz, status s)", "cannot hold", "Config.Active"},
		"no such state":    {"CREATE TYPE s AS ENUM ('held'); CREATE TABLE holds (id text, expires_at timestamptz, status s); CREATE INDEX ON holds (expires_at, id) WHERE status = 'held'", "cannot hold", "Config.Expired"},
		"status too short": {"CREATE TABLE holds (id text, expires_at timestamptz, status varchar(4)); CREATE INDEX ON holds (expires_at, id) WHERE status = 'held'", "cannot hold", "Config.Expired"},
		"no index":         {table, "no index", "CREATE INDEX"},
		"index on all":     {table + "CREATE INDEX ON holds (expires_at, id)", "no index", "CREATE INDEX"},
		"index elsewhere":  {table + "CREATE INDEX ON holds (expires_at, id) WHERE status = 'expired'", "no index", "CREATE INDEX"},
		"without deadline": {table + "CREATE INDEX ON holds (expires_at, id) WHERE status = 'held'; INSERT INTO holds VALUES ('x', NULL, 'held')", "no deadline", "SET NOT NULL"},
		"partial index":    {table + "CREATE INDEX ON holds (expires_at, id) WHERE status = 'held'", "", ""},
		"deadline alone":   {table + "CREATE INDEX ON holds (expires_at) WHERE status = 'held'", "", ""},
		"status first":     {table + "CREATE INDEX ON holds (status, expires_at, id)", "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := &backend{pool: pgtest.New(t)}
			b.exec(t, tc.sql)
			found, err := b.store(t, expirypgx.Config{}).Check(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if tc.problem == "" {
				if len(found) > 0 {
					t.Errorf("found %v, want nothing", found)
				}
				return
			}
			if len(found) != 1 || !strings.Contains(found[0].Problem, tc.problem) || !strings.Contains(found[0].Mend, tc.mend) {
				t.Errorf("found %v, want %q and %q", found, tc.problem, tc.mend)
			}
		})
	}
}

// The statement that Check suggests satisfies Check.
func TestCheckMendsTheIndex(t *testing.T) {
	t.Parallel()
	b := newBackend(t)
	b.exec(t, "DROP INDEX holds_expires_at_id_idx")
	store := b.store(t, expirypgx.Config{})
	found, err := store.Check(t.Context())
	if err != nil || len(found) != 1 {
		t.Fatalf("found %v, %v", found, err)
	}
	b.exec(t, found[0].Mend)
	if found, err = store.Check(t.Context()); err != nil || len(found) > 0 {
		t.Errorf("found %v, %v after mending", found, err)
	}
}
