package outboxpgx_test

import (
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

func TestCheckFindsWhatIsMissing(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct{ sql, want string }{
		"table":    {`DROP TABLE holdfast_outbox_dead`, `"holdfast_outbox_dead" does not exist`},
		"pauses":   {`DROP TABLE holdfast_outbox_pause`, `"holdfast_outbox_pause" does not exist`},
		"column":   {`ALTER TABLE holdfast_outbox DROP COLUMN last_error`, "last_error"},
		"index":    {`DROP INDEX holdfast_outbox_held`, "holdfast_outbox_held is missing"},
		"function": {`DROP FUNCTION holdfast_outbox_write`, "holdfast_outbox_write\" does not exist"},
		"lanes":    {`DELETE FROM holdfast_outbox_lanes WHERE lane = 3`, "15 of 16 lanes"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t, outboxpgx.Config{})
			f.exec(t, tc.sql)
			wantFinding(t, f.store, tc.want, "")
		})
	}
}

func TestCheckFindsTableSettings(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct{ sql, want, fix string }{
		"reset": {
			`ALTER TABLE holdfast_outbox RESET (autovacuum_vacuum_threshold, autovacuum_vacuum_cost_delay)`,
			`"holdfast_outbox" lacks the storage parameters autovacuum_vacuum_threshold = 500, autovacuum_vacuum_cost_delay = 0`,
			`ALTER TABLE "holdfast_outbox" SET (autovacuum_vacuum_threshold = 500, autovacuum_vacuum_cost_delay = 0)`,
		},
		"lanes": {`ALTER TABLE holdfast_outbox_lanes RESET (fillfactor)`, "fillfactor = 20", "SET (fillfactor = 20)"},
		"off":   {`ALTER TABLE holdfast_outbox_dead SET (autovacuum_enabled = off)`, `autovacuum is off for table "holdfast_outbox_dead"`, "RESET (autovacuum_enabled)"},
		"tuned": {`ALTER TABLE holdfast_outbox SET (autovacuum_vacuum_scale_factor = 0.5)`, "", ""},
		"trigger": {
			`CREATE FUNCTION archive() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$;
			CREATE TRIGGER archive BEFORE DELETE ON holdfast_outbox FOR EACH ROW EXECUTE FUNCTION archive()`,
			"trigger archive of table holdfast_outbox may drop changes without an error", "DROP TRIGGER archive ON holdfast_outbox",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t, outboxpgx.Config{})
			f.exec(t, tc.sql)
			wantFinding(t, f.store, tc.want, tc.fix)
			if tc.fix == "" || !strings.HasPrefix(tc.fix, "ALTER") {
				return
			}
			f.exec(t, tc.fix)
			wantFinding(t, f.store, "", "")
		})
	}
}

// wantFinding checks for one finding, or for none if problem is empty.
func wantFinding(t *testing.T, store *outboxpgx.Store, problem, fix string) {
	t.Helper()
	if problem == "" { // on a busy server, notifications may be late
		testenv.Eventually(t, func() error { return store.Check(t.Context()) })
		return
	}
	const late = "notifications do not arrive"
	check := func() error {
		err := store.Check(t.Context())
		for end := time.Now().Add(testenv.Patience); problem != late && err != nil && strings.Contains(err.Error(), late) && time.Now().Before(end); {
			err = store.Check(t.Context())
		}
		return err
	}
	err := check()
	for n := 0; err == nil && n < 3; n++ { // a busy server may hide the finding
		err = check()
	}
	if err == nil || !strings.Contains(err.Error(), problem) {
		t.Fatalf("findings: %v, want %q", err, problem)
	}
	all := err.(interface{ Unwrap() []error }).Unwrap()
	finding, ok := all[0].(interface{ Fix() string })
	if len(all) != 1 || !ok || !strings.Contains(finding.Fix(), fix) {
		t.Errorf("findings: %v, want one with the fix %q", err, fix)
	}
}

// shadowed returns a pool that finds functions and views of its own schema before the server's. No test can
// set back the server's clock by hours.
func shadowed(t *testing.T) *pgxpool.Pool {
	t.Helper()
	plain, schema := pgtest.NewSchema(t)
	u, err := url.Parse(plain.Config().ConnString())
	must(t, err)
	q := u.Query()
	q.Set("search_path", schema+",pg_catalog")
	u.RawQuery = q.Encode()
	return pgtest.Pool(t, u.String(), 10)
}

func TestCheckFindsServerSettings(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct{ sql, want, fix string }{
		"as it is": {`SELECT 1`, "", ""},
		"no autovacuum": {
			`CREATE FUNCTION current_setting(text) RETURNS text LANGUAGE sql AS $$ SELECT CASE $1 WHEN 'autovacuum' THEN 'off' ELSE 'on' END $$`,
			"autovacuum is off", "ALTER SYSTEM SET autovacuum = on",
		},
		"clock ahead": {
			`CREATE FUNCTION clock_timestamp() RETURNS timestamptz LANGUAGE sql AS $$ SELECT pg_catalog.clock_timestamp() + interval '5 seconds' $$`,
			"differ by ", "NTP",
		},
		"clock behind": {
			`CREATE FUNCTION clock_timestamp() RETURNS timestamptz LANGUAGE sql AS $$ SELECT pg_catalog.clock_timestamp() - interval '90 seconds' $$`,
			"differ by ", "NTP",
		},
		"prepared transaction": {
			`CREATE VIEW pg_prepared_xacts AS SELECT 'it''s old'::text AS gid, now() - interval '1 hour' AS prepared, current_database() AS database`,
			"prepared transaction 'it''s old' has been open for 01:00:00", "ROLLBACK PREPARED 'it''s old'",
		},
		"young prepared transaction": {
			`CREATE VIEW pg_prepared_xacts AS SELECT 'a'::text AS gid, now() - interval '1 minute' AS prepared, current_database() AS database`, "", "",
		},
		"prepared transaction elsewhere": {
			`CREATE VIEW pg_prepared_xacts AS SELECT 'a'::text AS gid, now() - interval '1 hour' AS prepared, 'other'::text AS database`, "", "",
		},
		"slot": {
			`CREATE VIEW pg_replication_slots AS SELECT 'old standby'::text AS slot_name, false AS active,
			 ((pg_catalog.pg_current_xact_id()::text::numeric + 4294967296 - 200000) % 4294967296)::text::xid AS xmin`,
			"replication slot 'old standby' (not active) is 200", "pg_drop_replication_slot('old standby')",
		},
		"slot that keeps up": {
			`CREATE VIEW pg_replication_slots AS SELECT 'standby'::text AS slot_name, true AS active, pg_catalog.pg_current_xact_id()::xid AS xmin`, "", "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setupOn(t, shadowed(t), outboxpgx.Config{})
			f.exec(t, tc.sql)
			wantFinding(t, f.store, tc.want, tc.fix)
		})
	}
}

// The transaction is real, except for its age.
func TestCheckFindsLongTransactions(t *testing.T) {
	t.Parallel()
	f := setupOn(t, shadowed(t), outboxpgx.Config{})
	f.exec(t, `
		CREATE VIEW pg_stat_activity AS SELECT datname, pid, application_name, state, backend_type, backend_xmin, backend_xid, xact_start - interval '1 hour' AS xact_start
		FROM pg_catalog.pg_stat_activity WHERE application_name = 'night report of ' || current_schema()`)
	conn, err := f.pool.Acquire(t.Context())
	must(t, err)
	defer conn.Release()
	var name string
	must(t, conn.QueryRow(t.Context(), `SELECT set_config('application_name', 'night report of ' || current_schema(), false)`).Scan(&name))
	wantFinding(t, f.store, "", "")
	tx, err := conn.Begin(t.Context())
	must(t, err)
	wantFinding(t, f.store, "", "") // it holds nothing yet
	_, err = tx.Exec(t.Context(), `SELECT pg_current_xact_id(), 'a secret'`)
	must(t, err)
	wantFinding(t, f.store, "("+name+", idle in transaction) has been open for 01:00:0", "SELECT pg_terminate_backend(")
	if err := f.store.Check(t.Context()); strings.Contains(err.Error(), "secret") {
		t.Errorf("the finding contains the query: %v", err)
	}
	must(t, tx.Rollback(t.Context()))
	wantFinding(t, f.store, "", "")
}
