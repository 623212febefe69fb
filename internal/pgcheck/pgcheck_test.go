package pgcheck_test

import (
	"crypto/rand"
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/internal/pgcheck"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// cases are the ways in which a table of users' own making drops changes, and others that do not. want is a part of the
// one finding, "" where there is none.
var cases = []struct{ name, sql, want string }{
	{"nothing", ``, ""},
	{"a trigger that returns NULL", before("INSERT", `BEGIN IF NEW.v = 'x' THEN RETURN NULL; END IF; RETURN NEW; END`), "function may return NULL"},
	{"a trigger that returns a variable", before("UPDATE", `DECLARE r t; BEGIN RETURN r; END`), "function may return r"},
	{"a DELETE that returns NEW", before("DELETE", `BEGIN INSERT INTO archive VALUES (OLD.*); RETURN NEW; END`), "does not return OLD"},
	{"an UPDATE that returns OLD", before("UPDATE", `BEGIN RETURN OLD; END`), "does not return NEW"},
	{"all changes that return NEW", before("INSERT OR UPDATE OR DELETE", `BEGIN RETURN NEW; END`), "does not return OLD"},
	{"an archive", before("DELETE", `BEGIN INSERT INTO archive VALUES (OLD.*); RETURN OLD; END`), ""},
	{"a time of the change", before("INSERT OR UPDATE", `BEGIN NEW.v := 'return null;'; /* RETURN NULL; */ RETURN NEW; -- return null;
		END`), ""},
	{"either row", before("INSERT OR UPDATE OR DELETE", `BEGIN RETURN coalesce(NEW, OLD); END`), ""},
	{"each its row", before("UPDATE OR DELETE", `BEGIN IF TG_OP = 'DELETE' THEN RETURN (OLD); END IF; RETURN NEW; END`), ""},
	{"a trigger after the change", after(`BEGIN RETURN NULL; END`), ""},
	{"a trigger that is off", before("INSERT", `BEGIN RETURN NULL; END`) + `; ALTER TABLE t DISABLE TRIGGER swallow`, ""},
	{"an UPDATE that changes nothing", `CREATE TRIGGER z BEFORE UPDATE ON t FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()`, "changes nothing"},
	{"a rule", `CREATE RULE keep AS ON DELETE TO t DO INSTEAD NOTHING`, "rule keep of table t"},
	{"a rule beside", `CREATE RULE log AS ON INSERT TO t DO ALSO INSERT INTO archive VALUES (NEW.*)`, ""},
	{"children", `CREATE TABLE t_2026 () INHERITS (t)`, "partitioned by inheritance (t_2026)"},
	{"row security", `ALTER TABLE t ENABLE ROW LEVEL SECURITY`, "row-level security of table t"},
	{"a policy of a part", `ALTER TABLE t ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON t USING (v = 'mine')`, "row-level security of table t"},
	{"a policy of all", `ALTER TABLE t ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON t USING (true)`, ""},
	{"a policy that restricts", `ALTER TABLE t ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON t USING (true); CREATE POLICY q ON t AS RESTRICTIVE USING (v = 'mine')`, "row-level security of table t"},
}

func before(events, body string) string { return trigger("BEFORE "+events, body) }

func after(body string) string { return trigger("AFTER INSERT", body) }

func trigger(when, body string) string {
	return `CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS $$` + body + `$$;
		CREATE TRIGGER swallow ` + when + ` ON t FOR EACH ROW EXECUTE FUNCTION swallow()`
}

func TestDrops_namesTheCause(t *testing.T) {
	t.Parallel()
	pool, schema := pgtest.NewSchema(t)
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			tx, err := pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer tx.Rollback(t.Context()) // and with it the role
			role := "pgcheck_" + strings.ToLower(rand.Text())
			exec(t, tx, `CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE archive (LIKE t);`+c.sql+`;
				CREATE ROLE `+role+`; GRANT USAGE ON SCHEMA `+schema+` TO `+role+`; SET LOCAL ROLE `+role)
			found := check.Findings{Component: "test"}
			if err := pgcheck.Drops(t.Context(), tx, &found, "t", "missing"); err != nil {
				t.Fatal(err)
			}
			err = found.Err()
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("found %v, want %q", err, c.want)
			}
		})
	}
}

// A partition has triggers of its own.
func TestDrops_looksAtPartitions(t *testing.T) {
	t.Parallel()
	tx, err := pgtest.New(t).Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(t.Context())
	exec(t, tx, `CREATE TABLE parent (id int PRIMARY KEY) PARTITION BY RANGE (id); CREATE TABLE t PARTITION OF parent DEFAULT;`+before("DELETE", `BEGIN RETURN NULL; END`))
	found := check.Findings{Component: "test"}
	if err := pgcheck.Drops(t.Context(), tx, &found, "parent"); err != nil {
		t.Fatal(err)
	}
	if err := found.Err(); err == nil || !strings.Contains(err.Error(), "trigger swallow of table t ") {
		t.Errorf("found %v, want the trigger of the partition", err)
	}
}

func exec(t *testing.T, tx pgx.Tx, sql string) {
	t.Helper()
	if _, err := tx.Conn().PgConn().Exec(t.Context(), sql).ReadAll(); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}
