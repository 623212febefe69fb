package idempotencypgx_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	pgxdriver "github.com/holdfast-go/holdfast/idempotency/idempotencypgx/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/internal/metrictest"
	silence "github.com/holdfast-go/holdfast/internal/silent"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
)

// onSilent runs a test in a bubble, with a pool to the real server. The clock stands still while the server works.
func onSilent(t *testing.T, test func(t *testing.T, s *silence.Postgres, pool *pgxpool.Pool)) {
	t.Helper()
	url := pgtest.URL(t)
	synctest.Test(t, func(t *testing.T) {
		s := silence.NewPostgres(t, url)
		test(t, s, migrated(t, s.Pool(t, 10)))
	})
}

// If a connection falls silent in the middle of a statement, the caller waits 2 s and tries again on another
// connection. That is no error, because every statement may run again.
func TestSilentInTheMiddleOfAStatement(t *testing.T) {
	t.Parallel()
	pgtest.URL(t) // skips before the subtests start
	for _, deliver := range []bool{false, true} {
		t.Run(fmt.Sprint("delivered=", deliver), func(t *testing.T) {
			t.Parallel()
			onSilent(t, func(t *testing.T, s *silence.Postgres, pool *pgxpool.Pool) {
				testSilentInTheMiddleOfAStatement(t, s, pool, deliver)
			})
		})
	}
}

func testSilentInTheMiddleOfAStatement(t *testing.T, server *silence.Postgres, pool *pgxpool.Pool, deliver bool) {
	s := newStore(t, pool, idempotencypgx.Config{Lease: time.Hour, Retention: time.Hour})
	c := newClaim()
	on := ""
	step := func(what string, take func(ctx context.Context) error) {
		t.Helper()
		if err := pool.Ping(t.Context()); err != nil {
			t.Fatal(err)
		}
		before := server.Silenced()
		server.SilenceOn(testenv.Silence{On: on, Deliver: deliver})
		start := time.Now()
		if err := take(t.Context()); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		silence.Took(t, what, start, 2*time.Second)
		if n := server.Silenced() - before; n != 1 {
			t.Errorf("%s: %d connections silent", what, n)
		}
	}
	begin := func(want driver.State) func(ctx context.Context) error {
		return func(ctx context.Context) error {
			out, err := s.Begin(ctx, c)
			if err == nil && out.State != want {
				err = fmt.Errorf("%+v", out)
			}
			return err
		}
	}
	step("begin", begin(driver.Acquired))
	step("extend", func(ctx context.Context) error { return s.Extend(ctx, c) })
	step("release", func(ctx context.Context) error {
		err := s.Release(ctx, c)
		if deliver && errors.Is(err, idempotency.ErrLeaseLost) {
			return nil // the first Release freed the key
		}
		return err
	})
	step("begin again", begin(driver.Acquired))
	step("complete", func(ctx context.Context) error { return s.Complete(ctx, c, driver.Response{Status: 201}) })
	step("replay", begin(driver.Completed))

	records := newRecords(t, pool)
	step("look up", func(ctx context.Context) error {
		_, found, err := records.Lookup(ctx, "claim:"+c.Key)
		return errors.Join(err, foundAs(found, true))
	})
	step("resolve", func(ctx context.Context) error {
		_, found, err := records.Resolve(ctx, driver.Key(idempotency.NewKey()))
		return errors.Join(err, foundAs(found, false))
	})
	step("check", s.Check)

	on, c = "INSERT INTO", newClaim() // after the SELECT
	step("claim", begin(driver.Acquired))
}

func foundAs(found, want bool) error {
	if found != want {
		return fmt.Errorf("found is %v", found)
	}
	return nil
}

// If all connections fall silent at once, the first caller gets its answer after one wait, and all of them are
// closed.
func TestHalfOpenConnections(t *testing.T) {
	t.Parallel()
	onSilent(t, func(t *testing.T, server *silence.Postgres, pool *pgxpool.Pool) {
		s := newStore(t, pool, idempotencypgx.Config{})
		pgtest.Idle(t, pool, int(pool.Config().MaxConns))
		server.SilenceConnections()
		start := time.Now()
		if _, err := s.Begin(t.Context(), newClaim()); err != nil {
			t.Error(err)
		}
		silence.Took(t, "Begin", start, 2*time.Second)
		time.Sleep(3 * time.Second) // 2 s for an answer, and 1 s to close
		synctest.Wait()
		if n := server.Kept(); n > 0 || server.Silenced() != int(pool.Config().MaxConns) {
			t.Errorf("%d of %d silent connections are open", n, server.Silenced())
		}
	})
}

// Errors before Migrate name Migrate as the fix.
func TestErrorsBeforeMigrate(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	s, records := newStore(t, pool, idempotencypgx.Config{}), newRecords(t, pool)
	c := newClaim()
	rec := pgxdriver.Record{Key: c.Key, Response: driver.Response{Status: 200}}
	_, begin := s.Begin(t.Context(), c)
	_, _, lookup := records.Lookup(t.Context(), c.Key)
	_, _, resolve := records.Resolve(t.Context(), c.Key)
	_, prune := s.Prune(t.Context())
	manager := newManager(t, pool)
	for what, err := range map[string]error{
		"Begin": begin, "Extend": s.Extend(t.Context(), c), "Release": s.Release(t.Context(), c),
		"Complete": s.Complete(t.Context(), c, rec.Response), "Lookup": lookup, "Resolve": resolve, "Prune": prune,
		"Insert": pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return records.Insert(t.Context(), tx, rec) }),
		"Insert with COMMIT": manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
			return records.Insert(ctx, tx, rec)
		}),
	} {
		if err == nil || !strings.Contains(err.Error(), "Migrate") {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// throughProxy returns a pool behind a proxy, on a schema with the table.
func throughProxy(t *testing.T) (*pgxpool.Pool, *testenv.Proxy) {
	t.Helper()
	url := pgtest.URL(t)
	proxy := testenv.NewProxy(t, url)
	pool := pgtest.Pool(t, proxy.Rewrite(url), 10)
	t.Cleanup(proxy.Cut) // before the pool is closed
	if err := newStore(t, pool, idempotencypgx.Config{}).Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	return pool, proxy
}

// A probe for a record whose client falls silent after its INSERT does not block the key.
func TestSilentAfterTheProbe(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	direct, proxy := migrated(t, pgtest.Pool(t, url, 2)), testenv.NewProxy(t, url)
	pool := pgtest.Pool(t, proxy.Rewrite(url), 2)
	t.Cleanup(proxy.Cut) // before the pool is closed
	records := newRecords(t, pool)
	resolve := func(ctx context.Context, key driver.Key) error {
		_, found, err := records.Resolve(ctx, key)
		return errors.Join(err, foundAs(found, false))
	}
	if err := resolve(t.Context(), driver.Key(idempotency.NewKey())); err != nil { // prepares the statement
		t.Fatal(err)
	}
	key := driver.Key(idempotency.NewKey())
	proxy.SilenceOn(testenv.Silence{On: "stmtcache_", Deliver: true})
	ctx, giveUp := context.WithCancel(t.Context())
	resolved := make(chan error, 1)
	go func() { resolved <- resolve(ctx, key) }()
	testenv.Eventually(t, func() error {
		if proxy.Silenced() == 0 {
			return errors.New("not silent yet")
		}
		return nil
	})
	giveUp()
	if err := <-resolved; err == nil {
		t.Error("it was answered")
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	// Resolve waits for the transaction of the silent connection.
	if _, found, err := newRecords(t, direct).Resolve(ctx, key); found || err != nil {
		t.Errorf("the key is not free: %v, %v", found, err)
	}
}

// A request that is rejected because Postgres is down counts as store_unavailable, whether the transaction could not
// begin or was lost, and whether the middleware or the handler claimed the key.
func TestOutageIsCounted(t *testing.T) {
	t.Parallel()
	pool, proxy := throughProxy(t)
	quiet := slog.New(slog.DiscardHandler)
	lose := func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		proxy.Cut()
		_, err := tx.Exec(ctx, `SELECT`)
		return idempotency.Response{Status: http.StatusCreated}, err
	}
	own := func(s *idempotencypgx.Store) http.Handler { // a user's handler
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			resp, err := s.Do(r.Context(), lose)
			if err != nil {
				w.WriteHeader(http.StatusServiceUnavailable)
				return
			}
			resp.Send(w)
		})
	}
	straight := func(s *idempotencypgx.Store) http.Handler {
		return s.Handler(func(ctx context.Context, tx pgx.Tx, _ *http.Request) (idempotency.Response, error) {
			return lose(ctx, tx)
		})
	}
	for name, tt := range map[string]struct {
		cfg     idempotencypgx.Config
		handler func(*idempotencypgx.Store) http.Handler
		open    bool
	}{
		"Handler":                            {idempotencypgx.Config{}, straight, false},
		"Handler behind a gate":              {idempotencypgx.Config{Gate: idempotencytest.NewStore()}, straight, false},
		"Handler with a lease":               {idempotencypgx.Config{Lease: 30 * time.Second}, straight, false},
		"Do in a handler":                    {idempotencypgx.Config{}, own, false},
		"Do, behind a gate":                  {idempotencypgx.Config{Gate: idempotencytest.NewStore()}, own, false},
		"Do, with a lease":                   {idempotencypgx.Config{Lease: 30 * time.Second}, own, false},
		"Do, with a lease, on an open route": {idempotencypgx.Config{Lease: 30 * time.Second}, own, true},
	} {
		var r metrictest.Recorder
		tt.cfg.Logger = quiet
		store := newAlone(t, pool, tt.cfg)
		protect, err := idempotency.NewMiddleware(store, idempotency.UnsafeGlobalScope, idempotency.MiddlewareConfig{
			MeterProvider: &r, Logger: quiet, FailOpen: func(*http.Request) bool { return tt.open },
		})
		must(t, err)
		h := protect(tt.handler(store))
		proxy.Heal()
		testenv.Eventually(t, func() error { return pool.Ping(t.Context()) })
		for range 2 { // the first one loses the connection, the second one cannot connect
			req := httptest.NewRequest(http.MethodPost, "/", nil)
			req.Header.Set(idempotency.Header, string(idempotency.NewKey()))
			rec := httptest.NewRecorder()
			if h.ServeHTTP(rec, req); rec.Code != http.StatusServiceUnavailable {
				t.Errorf("%s: %d %s", name, rec.Code, rec.Body)
			}
		}
		got := map[string]int64{}
		for key, values := range r.Take() {
			if result, ok := strings.CutPrefix(key, "holdfast.idempotency.requests{result="); ok {
				got[strings.TrimSuffix(result, "}")] = int64(values[0])
			}
		}
		if want := (map[string]int64{"store_unavailable": 2}); !maps.Equal(got, want) {
			t.Errorf("%s: counted %v, want %v", name, got, want)
		}
	}
}
