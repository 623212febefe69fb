package pgcheck_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/internal/pgcheck"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
	"github.com/holdfast-go/holdfast/txretry"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// cases are changes that users make to a table. want is a part of the one finding, "" if there must be none.
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

// settings are session settings that change the text form of values. If Check reports one, nothing else is promised.
var settings = []struct{ setting, reported string }{
	{"bytea_output=escape", "bytea_output"},
	{"datestyle=SQL,DMY", "DateStyle"},
	{"datestyle=German", "DateStyle"},
	{"client_encoding=latin1", "client_encoding"},
	{"datestyle=ISO,DMY", ""},
	{"intervalstyle=sql_standard", ""},
	{"intervalstyle=iso_8601", ""},
	{"timezone=Asia/Kolkata", ""},
	{"extra_float_digits=-15", ""},
	{"backslash_quote=off", ""},
	{"escape_string_warning=on", ""},
	{"array_nulls=off", ""},
	{"quote_all_identifiers=on", ""},
	{"default_transaction_isolation=serializable", ""},
	{"default_transaction_deferrable=on", ""},
	{"xmloption=document", ""},
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// All stores work with every setting of a session, or their Checks report it.
func TestSettings_workOrAreReported(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	setUp(t, pool)
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		for _, s := range settings {
			if s.reported == "client_encoding" && mode == pgx.QueryExecModeSimpleProtocol {
				continue // pgx refuses it
			}
			t.Run(mode.String()+" "+s.setting, func(t *testing.T) {
				t.Parallel()
				cfg := pool.Config()
				cfg.ConnConfig.DefaultQueryExecMode = mode
				name, value, _ := strings.Cut(s.setting, "=")
				cfg.ConnConfig.RuntimeParams[name] = value
				own, err := pgxpool.NewWithConfig(t.Context(), cfg)
				must(t, err)
				t.Cleanup(own.Close)
				for store, check := range newStores(t, own).checks() {
					err := fmt.Sprint(check(t.Context()))
					switch {
					case s.reported != "" && !strings.Contains(err, s.reported+" is"):
						t.Errorf("%s reports %s", store, err)
					case s.reported == "" && (strings.Contains(err, "pgx cannot read") || strings.Contains(err, "client_encoding")):
						t.Errorf("%s reports %s", store, err)
					}
				}
			})
		}
	}
}

// All unreported settings together.
func TestSettings_thatWork(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			pool := pgtest.New(t)
			setUp(t, pool)
			cfg := pool.Config()
			cfg.ConnConfig.DefaultQueryExecMode = mode
			for _, s := range settings {
				if name, value, _ := strings.Cut(s.setting, "="); s.reported == "" {
					cfg.ConnConfig.RuntimeParams[name] = value
				}
			}
			own, err := pgxpool.NewWithConfig(t.Context(), cfg)
			must(t, err)
			t.Cleanup(own.Close)
			newStores(t, own).work(t)
		})
	}
}

type stores struct {
	manager *txretry.Manager
	outbox  *outboxpgx.Store
	inbox   *inboxpgx.Store
	once    *idempotencypgx.Store
	holds   *expirypgx.Store
}

func newStores(t *testing.T, pool *pgxpool.Pool) (s stores) {
	t.Helper()
	var err error
	s.manager, err = txretry.New(pool, txretry.Config{})
	must(t, err)
	s.outbox, err = outboxpgx.New(pool, outboxpgx.Config{PollOnly: true})
	must(t, err)
	s.inbox, err = inboxpgx.New(s.manager, "a", inboxpgx.Config{})
	must(t, err)
	s.once, err = idempotencypgx.New(s.manager, idempotencypgx.Config{})
	must(t, err)
	s.holds, err = expirypgx.New(s.manager, "holds", expirypgx.Config{PollOnly: true})
	must(t, err)
	return s
}

func setUp(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	s := newStores(t, pool)
	must(t, s.outbox.Migrate(t.Context()))
	must(t, s.inbox.Migrate(t.Context()))
	must(t, s.once.Migrate(t.Context()))
	_, err := pool.Exec(t.Context(), "CREATE TABLE holds (id text PRIMARY KEY, status text NOT NULL, expires_at timestamptz NOT NULL); CREATE INDEX ON holds (expires_at, id) WHERE status = 'held'")
	must(t, err)
}

func (s stores) checks() map[string]func(ctx context.Context) error {
	return map[string]func(ctx context.Context) error{
		"outbox": s.outbox.Check, "inbox": s.inbox.Check, "idempotency": s.once.Check, "expiry": s.holds.Check,
	}
}

// work has each store write and read.
func (s stores) work(t *testing.T) {
	t.Helper()
	ctx, body := t.Context(), []byte("a\\b\x00\xff'é")
	due := time.Now().Add(-time.Hour).Truncate(time.Microsecond)
	must(t, s.manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "INSERT INTO holds VALUES ('one', 'held', $1)", due); err != nil {
			return err
		}
		return s.outbox.Write(ctx, tx, outbox.Message{Name: "a", Body: body, ContentType: "application/octet-stream", Headers: map[string]string{"h": `\'é`}})
	}))
	published := outboxtest.NewPublisher()
	relay, err := outbox.NewRelay(s.outbox, published, outbox.RelayConfig{})
	must(t, err)
	_, err = relay.Drain(ctx, outbox.Bounds{Limit: 1})
	must(t, err)
	if all := published.Received(); len(all) != 1 || !bytes.Equal(all[0].Body, body) || all[0].Headers["h"] != `\'é` {
		t.Errorf("published %v", all)
	}
	key := idempotency.NewKey()
	for _, want := range []bool{false, true} {
		answer, replayed, err := s.once.DoKey(ctx, key, nil, func(context.Context, pgx.Tx) (idempotency.Response, error) {
			return idempotency.Response{Status: 200, Body: body}, nil
		})
		if err != nil || replayed != want || !bytes.Equal(answer.Body, body) {
			t.Errorf("idempotency: %q, replayed %v, error %v", answer.Body, replayed, err)
		}
	}
	batch, err := s.holds.SweepBatch(ctx, driver.Request{Limit: 10})
	if err != nil || batch.Expired != 1 {
		t.Errorf("expiry: %+v, error %v", batch, err)
	}
}
