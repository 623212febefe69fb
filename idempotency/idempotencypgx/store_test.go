package idempotencypgx_test

import (
	"context"
	"crypto/rand"
	"errors"
	"io/fs"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	pgxdriver "github.com/holdfast-go/holdfast/idempotency/idempotencypgx/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest/conformance"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

func TestMigrateSideBySide(t *testing.T) {
	t.Parallel()
	pool, schema := pgtest.NewSchema(t)
	store := newStore(t, pool, idempotencypgx.Config{Schema: schema, Table: "answers"})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if err := store.Migrate(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if err := store.Check(t.Context()); err != nil {
		t.Errorf("Check = %v", err)
	}
	c := newClaim()
	if out, err := store.Begin(t.Context(), c); err != nil || out.State != driver.Acquired {
		t.Errorf("Begin = %+v, %v", out, err)
	}
}

func TestSchema(t *testing.T) {
	t.Parallel()
	store := newStore(t, pgtest.New(t), idempotencypgx.Config{Schema: "app"})
	sql, err := fs.ReadFile(store.Schema(), "0005_idempotency.sql")
	if err != nil || !strings.Contains(string(sql), `CREATE TABLE "app"."holdfast_idempotency"`) {
		t.Errorf("%s, %v", sql, err)
	}
}

func TestCheckMissingTable(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	store := newStore(t, pool, idempotencypgx.Config{})
	for range 2 {
		finding, ok := errors.AsType[interface {
			error
			Fix() string
		}](store.Check(t.Context()))
		if !ok || !strings.Contains(finding.Fix(), "Migrate") || !strings.Contains(finding.Error(), "holdfast_idempotency") {
			t.Errorf("Check = %v", finding)
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
	must(t, err)
	store := newAlone(t, pool, idempotencypgx.Config{PruneInterval: -1})
	for _, want := range []int{2501, 0} {
		if n, err := store.Prunable(t.Context()); n != want || err != nil {
			t.Errorf("Prunable = %d, %v; want %d", n, err, want)
		}
		if n, err := store.Prune(t.Context()); n != want || err != nil {
			t.Errorf("Prune = %d, %v; want %d", n, err, want)
		}
	}
	var left string
	err = pool.QueryRow(t.Context(), `SELECT string_agg(key, ' ' ORDER BY key) FROM holdfast_idempotency`).Scan(&left)
	if err != nil || left != "fresh running" {
		t.Errorf("left %q, %v", left, err)
	}
}

// With few due records, a pass reads only those.
func TestPruneReadsWhatIsDue(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	_, err := pool.Exec(t.Context(), `INSERT INTO holdfast_idempotency (key, fingerprint, fingerprint_version, status, token, expires_at)
		SELECT n::text, '', 0, 'completed', '', now() + n * interval '1 minute' FROM generate_series(-4, 10000) n`)
	must(t, err)
	if _, err := pool.Exec(t.Context(), `ANALYZE holdfast_idempotency`); err != nil {
		t.Fatal(err)
	}
	rows, err := pool.Query(t.Context(), `EXPLAIN `+idempotencypgx.PruneSQL(), pgx.QueryExecModeExec, 1000, 0)
	must(t, err)
	plan, err := pgx.CollectRows(rows, pgx.RowTo[string])
	must(t, err)
	if text := strings.Join(plan, "\n"); !strings.Contains(text, "Index Cond: (expires_at <= now())") {
		t.Errorf("the plan is\n%s", text)
	}
}

// The database's default isolation may be stricter.
func TestRivalsUnderSerializable(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, pgtest.URL(t)+"&default_transaction_isolation=serializable", 10)
	store := newStore(t, pool, idempotencypgx.Config{})
	must(t, store.Migrate(t.Context()))
	for range 30 {
		key, winner := driver.Key(idempotency.NewKey()), make(chan driver.Claim, 10)
		var wg sync.WaitGroup
		for range cap(winner) {
			wg.Go(func() {
				c := driver.NewClaim(key, driver.FingerprintOf())
				out, err := store.Begin(t.Context(), c)
				for end := time.Now().Add(time.Minute); errors.Is(err, context.DeadlineExceeded) && time.Now().Before(end); {
					out, err = store.Begin(t.Context(), c) // retried: the machine is busy
				}
				if err != nil {
					t.Errorf("Begin: %v", err)
				} else if out.State == driver.Acquired {
					winner <- c
				}
			})
		}
		wg.Wait()
		if len(winner) != 1 {
			t.Fatalf("%d winners", len(winner))
		}
		if err := store.Complete(t.Context(), <-winner, driver.Response{Status: 200}); err != nil {
			t.Errorf("Complete: %v", err)
		}
	}
}

// A read-only session rejects every statement that could write.
func TestReplayWritesNothing(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, pgtest.URL(t), 1) // one session
	store := newStore(t, pool, idempotencypgx.Config{})
	must(t, store.Migrate(t.Context()))
	c := newClaim()
	if _, err := store.Begin(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	must(t, store.Complete(t.Context(), c, driver.Response{Status: 200}))
	if _, err := pool.Exec(t.Context(), `SET default_transaction_read_only = on`); err != nil {
		t.Fatal(err)
	}
	out, err := store.Begin(t.Context(), driver.NewClaim(c.Key, c.Fingerprint))
	if err != nil || out.State != driver.Completed {
		t.Errorf("replay in a read-only session: %+v, %v", out, err)
	}
	if _, err := store.Begin(t.Context(), driver.NewClaim(driver.Key(idempotency.NewKey()), c.Fingerprint)); err == nil {
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
	_, err := idempotencypgx.New(nil, idempotencypgx.Config{
		Table: "no table", Lease: time.Nanosecond, Retention: -1, Gate: idempotencytest.NewStore(),
	})
	wantNames(err, "transactor", "Lease must", "Gate", "Retention", "no table")
	_, err = idempotencypgx.New(txretrytest.New(txretrytest.Config{}), idempotencypgx.Config{})
	wantNames(err, "pool", "Records")
	_, err = idempotencypgx.New(newManager(t, pgtest.New(t)), idempotencypgx.Config{
		Lease: time.Second, Records: idempotencypgx.NewRecords(pgtest.New(t)),
	})
	wantNames(err, "Lease and Records")
}

// Storing a record makes the store prune.
func TestStorePrunesByItself(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]idempotencypgx.Config{
		"the records alone": {PruneInterval: time.Millisecond},
		"claims in rows":    {PruneInterval: time.Millisecond, Lease: 30 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newPool(t)
			store := newAlone(t, pool, cfg)
			_, err := pool.Exec(t.Context(), `INSERT INTO holdfast_idempotency
				(key, fingerprint, fingerprint_version, status, token, lease_until, expires_at)
				VALUES ('old', '', 0, 'completed', '', NULL, clock_timestamp() - interval '1 s')`)
			must(t, err)
			testenv.Eventually(t, func() error {
				_, _, err := store.DoKey(t.Context(), idempotency.NewKey(), nil, func(context.Context, pgx.Tx) (idempotency.Response, error) {
					return idempotency.Response{Status: http.StatusOK}, nil
				})
				if err != nil {
					return err
				}
				var n int
				err = pool.QueryRow(t.Context(), `SELECT count(*) FROM holdfast_idempotency WHERE key = 'old'`).Scan(&n)
				if err == nil && n > 0 {
					err = errors.New("it is still there")
				}
				return err
			})
		})
	}
}

// ends checks the time left in a column of the table's only row, which was set a moment ago. A busy machine may have
// used some of it.
func ends(t *testing.T, pool *pgxpool.Pool, column string, want time.Duration) {
	t.Helper()
	var left time.Duration
	err := pool.QueryRow(t.Context(), `SELECT `+column+` - clock_timestamp() FROM holdfast_idempotency`).Scan(&left)
	if err != nil || left > want || left < want-15*time.Second {
		t.Errorf("%s ends in %v, %v; want %v", column, left, err, want)
	}
}

// A lease lasts 30 s and a record 48 h.
func TestDefaultTimes(t *testing.T) {
	t.Parallel()
	t.Run("store", func(t *testing.T) {
		t.Parallel()
		pool := newPool(t)
		store, c := newStore(t, pool, idempotencypgx.Config{}), newClaim()
		if out, err := store.Begin(t.Context(), c); err != nil || out.Lease != 30*time.Second {
			t.Fatalf("Begin = %+v, %v", out, err)
		}
		ends(t, pool, "lease_until", 30*time.Second)
		must(t, store.Extend(t.Context(), c))
		ends(t, pool, "lease_until", 30*time.Second)
		must(t, store.Complete(t.Context(), c, driver.Response{Status: 200}))
		ends(t, pool, "expires_at", 48*time.Hour)
	})
	t.Run("long work", func(t *testing.T) {
		t.Parallel()
		pool := newPool(t)
		store, c := newStore(t, pool, idempotencypgx.Config{}), newClaim()
		if _, err := store.Begin(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		if _, err := pool.Exec(t.Context(), `UPDATE holdfast_idempotency SET expires_at = expires_at - interval '1 hour'`); err != nil {
			t.Fatal(err)
		}
		must(t, store.Complete(t.Context(), c, driver.Response{Status: 200}))
		ends(t, pool, "expires_at", 48*time.Hour-30*time.Second)
	})
	t.Run("records", func(t *testing.T) {
		t.Parallel()
		pool := newPool(t)
		records := newRecords(t, pool)
		err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			return records.Insert(t.Context(), tx, pgxdriver.Record{Key: driver.Key(idempotency.NewKey()), Response: driver.Response{Status: 200}})
		})
		must(t, err)
		ends(t, pool, "expires_at", 48*time.Hour)
	})
}

// silent records never answer.
type silent struct{ pgxdriver.Records }

func (silent) Lookup(ctx context.Context, _ driver.Key) (pgxdriver.Record, bool, error) {
	<-ctx.Done()
	return pgxdriver.Record{}, false, ctx.Err()
}

func TestDefaultsOfDo(t *testing.T) {
	t.Parallel()
	run := func(t *testing.T, records pgxdriver.Records, size int) error {
		t.Helper()
		store, err := idempotencypgx.New(txretrytest.New(txretrytest.Config{}), idempotencypgx.Config{Gate: idempotencytest.NewStore(), Records: records})
		must(t, err)
		_, _, err = store.DoKey(t.Context(), goodKey, nil, func(context.Context, pgx.Tx) (idempotency.Response, error) {
			if size == 0 {
				return idempotency.Response{}, context.Canceled
			}
			return idempotency.Response{Status: 200, Body: make([]byte, size)}, nil
		})
		return err
	}
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		if err := run(t, silent{}, 0); err == nil || time.Since(start) != 10*time.Second {
			t.Errorf("%v after %v; want an error after 10 s", err, time.Since(start))
		}
	})
	for size, unavailable := range map[int]bool{1 << 20: false, 1<<20 + 1: true} {
		records := &one{}
		if err := run(t, records, size); err != nil {
			t.Error(err)
		}
		if records.rec.Key != goodKey || records.rec.Response.Unavailable() != unavailable {
			t.Errorf("%d bytes: record of %q, a tombstone %v", size, records.rec.Key, records.rec.Response.Unavailable())
		}
	}
}

// one keeps the last record.
type one struct {
	pgxdriver.Records
	rec pgxdriver.Record
}

func (o *one) Insert(_ context.Context, _ pgx.Tx, rec pgxdriver.Record) error {
	o.rec = rec
	return nil
}

// backend gives all subtests one table: keys are random.
func backend(t *testing.T, pool *pgxpool.Pool) conformance.Backend {
	t.Helper()
	return conformance.Backend{
		New: func(t *testing.T) driver.Store { return newStore(t, pool, idempotencypgx.Config{}) },
		Pass: func(t *testing.T, key driver.Key, d time.Duration) {
			t.Helper()
			if _, err := pool.Exec(t.Context(), `UPDATE holdfast_idempotency
				SET lease_until = lease_until - $2::interval, expires_at = expires_at - $2::interval WHERE key = $1`, "claim:"+string(key), d); err != nil {
				t.Error(err)
			}
		},
	}
}

func TestStore(t *testing.T) {
	t.Parallel()
	conformance.TestStore(t, backend(t, newPool(t)))
}

func TestStoreBehindPgBouncer(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "the statements are those of TestStore; TestRivalsAlone goes through a PgBouncer with every change")
	conformance.TestStore(t, backend(t, pooled(t)))
}

// databases gives all subtests the same tables: keys are random.
func databases(t *testing.T) conformance.RecordsBackend {
	t.Helper()
	pool := newPool(t)
	if _, err := pool.Exec(t.Context(), `CREATE TABLE effects (name text NOT NULL)`); err != nil {
		t.Fatal(err)
	}
	return conformance.RecordsBackend{New: func(t *testing.T) conformance.Database {
		return conformance.Database{
			Transactor: newManager(t, pool),
			Records:    newRecords(t, pool),
			Add: func(ctx context.Context, tx pgx.Tx, name string) error {
				_, err := tx.Exec(ctx, `INSERT INTO effects VALUES ($1)`, name)
				return err
			},
			Count: func(t *testing.T, name string) (n int) {
				if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM effects WHERE name = $1`, name).Scan(&n); err != nil {
					t.Error(err)
				}
				return n
			},
		}
	}}
}

func TestRecords(t *testing.T) {
	t.Parallel()
	conformance.TestRecords(t, databases(t))
}

func TestDo(t *testing.T) {
	t.Parallel()
	conformance.TestDo(t, databases(t))
}

// The gate is on Redis, as in production.
func TestDoBehindRedis(t *testing.T) {
	t.Parallel()
	b := behindRedis(t, idempotencyredis.Config{})
	if os.Getenv(testenv.NightlyVar) == "1" {
		conformance.TestDo(t, b)
		return
	}
	conformance.TestGate(t, b)
}

func TestModelBehindRedis(t *testing.T) {
	t.Parallel()
	conformance.TestModel(t, behindRedis(t, idempotencyredis.Config{Lease: time.Second}))
}

func behindRedis(t *testing.T, cfg idempotencyredis.Config) conformance.RecordsBackend {
	t.Helper()
	client, b := redistest.New(t), databases(t)
	tables := b.New
	b.New = func(t *testing.T) conformance.Database {
		db := tables(t)
		db.Gate = func(t *testing.T) driver.Store {
			own := cfg // the tests run in parallel
			own.Prefix = rand.Text()
			gate, err := idempotencyredis.New(client, own)
			must(t, err)
			return gate
		}
		return db
	}
	return b
}

// Look finds the record of a transaction, even while the claim of the key, which has its own row, is still held.
func TestLookFindsTheRecordOfATransaction(t *testing.T) {
	t.Parallel()
	fake, err := idempotencytest.New(txretrytest.New(txretrytest.Config{}), idempotencypgx.Config{})
	must(t, err)
	pool := newPool(t)
	for name, store := range map[string]*idempotencypgx.Store{
		"alone": newAlone(t, pool, idempotencypgx.Config{}), "lease": newStore(t, pool, idempotencypgx.Config{}), "fake": fake,
	} {
		key := idempotency.NewKey()
		var within driver.Known
		inFlight, exact := -1, false
		_, _, err := store.DoKey(t.Context(), key, []string{"a request"}, func(ctx context.Context, _ pgx.Tx) (resp idempotency.Response, err error) {
			within, err = store.Look(context.WithoutCancel(ctx), driver.Key(key))
			if err == nil {
				inFlight, exact, err = store.InFlight(context.WithoutCancel(ctx))
			}
			return idempotency.Response{Status: 201, Body: []byte("made")}, err
		})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if within.State == driver.Completed {
			t.Errorf("%s: before the commit the key is done", name)
		}
		if held := within.State == driver.InProgress; name != "fake" && held != (inFlight == 1) || !exact {
			t.Errorf("%s: %d claims are in flight, %+v", name, inFlight, within)
		}
		if n, exact, err := store.InFlight(t.Context()); n != 0 || !exact || err != nil {
			t.Errorf("%s: %d claims are in flight at the end, %v", name, n, err)
		}
		known, err := store.Look(t.Context(), driver.Key(key))
		if err != nil || known.State != driver.Completed || known.Response.Status != 201 || string(known.Response.Body) != "made" {
			t.Errorf("%s: Look = %+v, %v", name, known, err)
		}
		if known.Fingerprint.Sum == "" || name != "fake" && (known.Left <= 0 || known.Since.IsZero()) {
			t.Errorf("%s: Look returned no fingerprint or no time: %+v", name, known)
		}
	}
}

// A SELECT would find nothing while the other transaction is committing.
func TestResolveWaitsForAnOpenTransaction(t *testing.T) {
	t.Parallel()
	for name, commit := range map[string]bool{"commits": true, "rolls back": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newPool(t)
			records := newRecords(t, pool)
			rec := pgxdriver.Record{Key: driver.Key(idempotency.NewKey()), Token: "t", Response: driver.Response{Status: 200}}
			tx, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.Serializable})
			must(t, err)
			defer func() { _ = tx.Rollback(context.Background()) }()
			if err := records.Insert(t.Context(), tx, rec); err != nil { // not a txretry handle: inserted at once
				t.Fatal(err)
			}

			type answer struct {
				found bool
				err   error
			}
			resolved := make(chan answer, 1)
			go func() {
				_, found, err := records.Resolve(t.Context(), rec.Key)
				resolved <- answer{found, err}
			}()
			testenv.Eventually(t, func() error { return waiting(t, pool) })
			select {
			case a := <-resolved:
				t.Fatalf("Resolve did not wait: %+v", a)
			default:
			}
			if commit {
				err = tx.Commit(t.Context())
			} else {
				err = tx.Rollback(t.Context())
			}
			if a := <-resolved; err != nil || a.err != nil || a.found != commit {
				t.Errorf("Resolve = %+v (end of transaction: %v); want found %v", a, err, commit)
			}
		})
	}
}
