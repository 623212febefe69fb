package idempotencypgx_test

import (
	"io/fs"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

func newStore(t *testing.T, pool *pgxpool.Pool, cfg idempotencypgx.Config) *idempotencypgx.Store {
	t.Helper()
	store, err := idempotencypgx.NewStore(pool, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return store
}

func TestMigrateSideBySide(t *testing.T) {
	t.Parallel()
	pool, schema := pgtest.NewSchema(t)
	cfg := idempotencypgx.SchemaConfig{Schema: schema, Table: "answers"}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if err := idempotencypgx.Migrate(t.Context(), pool, cfg); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	store := newStore(t, pool, idempotencypgx.Config{SchemaConfig: cfg})
	findings, err := store.Check(t.Context())
	if err != nil || len(findings) != 0 {
		t.Errorf("Check = %v, %v", findings, err)
	}
	c := idempotency.NewClaim(idempotency.NewKey(), idempotency.FingerprintOf())
	if out, err := store.Begin(t.Context(), c); err != nil || out.State != idempotency.Acquired {
		t.Errorf("Begin = %+v, %v", out, err)
	}
}

func TestMigrations(t *testing.T) {
	t.Parallel()
	files, err := idempotencypgx.Migrations(idempotencypgx.SchemaConfig{Schema: "app"})
	if err != nil {
		t.Fatal(err)
	}
	sql, err := fs.ReadFile(files, "0001_create.sql")
	if err != nil || !strings.Contains(string(sql), `CREATE TABLE "app"."holdfast_idempotency"`) {
		t.Errorf("%s, %v", sql, err)
	}
	if _, err := idempotencypgx.Migrations(idempotencypgx.SchemaConfig{Table: `x"; DROP TABLE y`}); err == nil {
		t.Error("a table name that is no identifier: no error")
	}
}

func TestCheckMissingTable(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	store, records := newStore(t, pool, idempotencypgx.Config{}), newRecords(t, pool)
	for range 2 {
		for name, check := range map[string]func() ([]idempotency.Finding, error){
			"store":   func() ([]idempotency.Finding, error) { return store.Check(t.Context()) },
			"records": func() ([]idempotency.Finding, error) { return records.Check(t.Context()) },
		} {
			findings, err := check()
			if err != nil || len(findings) != 1 || !strings.Contains(findings[0].Mend, "Migrate") {
				t.Errorf("%s: %v, %v", name, findings, err)
			}
		}
		if _, err := pool.Exec(t.Context(), `CREATE TABLE IF NOT EXISTS holdfast_idempotency (key text)`); err != nil {
			t.Fatal(err)
		}
	}
}

func TestPrune(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	_, err := pool.Exec(t.Context(), `INSERT INTO holdfast_idempotency
		(key, fingerprint, fingerprint_version, status, token, lease_until, expires_at)
		SELECT 'old' || n, '', 0, 'completed', '', NULL, clock_timestamp() - interval '1 s' FROM generate_series(1, 2500) n
		UNION ALL SELECT 'abandoned', '', 0, 'processing', '', clock_timestamp() - interval '1 s', clock_timestamp() - interval '1 s'
		UNION ALL SELECT 'running', '', 0, 'processing', '', clock_timestamp() + interval '1 h', clock_timestamp() - interval '1 s'
		UNION ALL SELECT 'fresh', '', 0, 'completed', '', NULL, clock_timestamp() + interval '1 h'`)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []int64{2501, 0} {
		if n, err := idempotencypgx.Prune(t.Context(), pool, idempotencypgx.SchemaConfig{}); n != want || err != nil {
			t.Errorf("Prune = %d, %v; want %d", n, err, want)
		}
	}
	var left string
	err = pool.QueryRow(t.Context(), `SELECT string_agg(key, ' ' ORDER BY key) FROM holdfast_idempotency`).Scan(&left)
	if err != nil || left != "fresh running" {
		t.Errorf("left %q, %v", left, err)
	}
}

func TestExpiredRecordIsFree(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	store := newStore(t, pool, idempotencypgx.Config{})
	c := idempotency.NewClaim(idempotency.NewKey(), idempotency.FingerprintOf("old"))
	if _, err := store.Begin(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if err := store.Complete(t.Context(), c, idempotency.Response{Status: 200, Body: []byte("old")}); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), `UPDATE holdfast_idempotency SET expires_at = clock_timestamp()`); err != nil {
		t.Fatal(err)
	}
	next := idempotency.NewClaim(c.Key, idempotency.FingerprintOf("new"))
	if out, err := store.Begin(t.Context(), next); err != nil || out.State != idempotency.Acquired {
		t.Errorf("Begin = %+v, %v", out, err)
	}
}

// A read-only session refuses every statement that could write.
// The database's default isolation may be a stricter one.
func TestRivalsUnderSerializable(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, pgtest.URL(t)+"&default_transaction_isolation=serializable", 10)
	if err := idempotencypgx.Migrate(t.Context(), pool, idempotencypgx.SchemaConfig{}); err != nil {
		t.Fatal(err)
	}
	store := newStore(t, pool, idempotencypgx.Config{})
	for range 30 {
		key, winner := idempotency.NewKey(), make(chan idempotency.Claim, 10)
		var wg sync.WaitGroup
		for range cap(winner) {
			wg.Go(func() {
				c := idempotency.NewClaim(key, idempotency.FingerprintOf())
				out, err := store.Begin(t.Context(), c)
				if err != nil {
					t.Errorf("Begin: %v", err)
				} else if out.State == idempotency.Acquired {
					winner <- c
				}
			})
		}
		wg.Wait()
		if len(winner) != 1 {
			t.Fatalf("%d winners", len(winner))
		}
		if err := store.Complete(t.Context(), <-winner, idempotency.Response{Status: 200}); err != nil {
			t.Errorf("Complete: %v", err)
		}
	}
}

func TestReplayWritesNothing(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, pgtest.URL(t), 1) // one session
	if err := idempotencypgx.Migrate(t.Context(), pool, idempotencypgx.SchemaConfig{}); err != nil {
		t.Fatal(err)
	}
	store := newStore(t, pool, idempotencypgx.Config{})
	c := idempotency.NewClaim(idempotency.NewKey(), idempotency.FingerprintOf())
	if _, err := store.Begin(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if err := store.Complete(t.Context(), c, idempotency.Response{Status: 200}); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), `SET default_transaction_read_only = on`); err != nil {
		t.Fatal(err)
	}
	out, err := store.Begin(t.Context(), idempotency.NewClaim(c.Key, c.Fingerprint))
	if err != nil || out.State != idempotency.Completed {
		t.Errorf("replay in a read-only session: %+v, %v", out, err)
	}
	if _, err := store.Begin(t.Context(), idempotency.NewClaim(idempotency.NewKey(), c.Fingerprint)); err == nil {
		t.Error("a new key was claimed in a read-only session")
	}
}

func TestConfig(t *testing.T) {
	t.Parallel()
	wantNames := func(err error, names ...string) {
		t.Helper()
		for _, name := range names {
			if err == nil || !strings.Contains(err.Error(), name) {
				t.Errorf("error does not name %s: %v", name, err)
			}
		}
	}
	bad := idempotencypgx.SchemaConfig{Table: "no table"}
	_, err := idempotencypgx.NewStore(nil, idempotencypgx.Config{SchemaConfig: bad, Lease: time.Nanosecond, Retention: -1})
	wantNames(err, "pool", "Lease", "Retention", "no table")
	_, err = idempotencypgx.NewRecords(nil, idempotencypgx.RecordsConfig{SchemaConfig: bad, Retention: -1})
	wantNames(err, "pool", "Retention", "no table")
	_, err = idempotencypgx.NewRunner(nil, nil, nil, idempotencypgx.RunnerConfig{MaxResponseBytes: -1, ResolveTimeout: -1})
	wantNames(err, "transactor", "records", "gate", "MaxResponseBytes", "ResolveTimeout")

	pool := pgtest.New(t)
	manager := txretrytest.New(txretrytest.Config{})
	records := newRecords(t, pool)
	_, err = idempotencypgx.NewRunner(manager, records, newStore(t, pool, idempotencypgx.Config{}), idempotencypgx.RunnerConfig{})
	wantNames(err, "holdfast_idempotency")
	other := newStore(t, pool, idempotencypgx.Config{SchemaConfig: idempotencypgx.SchemaConfig{Table: "gate"}})
	for _, gate := range []idempotency.Store{other, idempotencytest.NewStore()} {
		if _, err = idempotencypgx.NewRunner(manager, records, gate, idempotencypgx.RunnerConfig{}); err != nil {
			t.Error(err)
		}
	}
}
