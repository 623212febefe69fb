package idempotencytest_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest/conformance"
	"github.com/holdfast-go/holdfast/internal/prove"
	"github.com/holdfast-go/holdfast/internal/prove/provetest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

var backend = conformance.Backend{
	New:    func(*testing.T) driver.Store { return idempotencytest.NewStore() },
	Bubble: true,
}

func TestStore(t *testing.T) {
	t.Parallel()
	conformance.TestStore(t, backend)
}

func TestMiddleware(t *testing.T) {
	t.Parallel()
	conformance.TestMiddleware(t, backend)
}

// effects counts in memory, as part of fake transactions.
type effects struct {
	mu    sync.Mutex
	count map[string]int
}

func (e *effects) add(name string, n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.count[name] += n
}

func (e *effects) Add(_ context.Context, tx pgx.Tx, name string) error {
	return txretrytest.Effect(tx, func() { e.add(name, 1) }, func() { e.add(name, -1) })
}

func (e *effects) Count(_ *testing.T, name string) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.count[name]
}

var databases = conformance.RecordsBackend{
	Bubble: true,
	New: func(*testing.T) conformance.Database {
		e := &effects{count: map[string]int{}}
		return conformance.Database{
			Transactor: txretrytest.New(txretrytest.Config{}),
			Records:    idempotencytest.NewRecords(),
			Add:        e.Add,
			Count:      e.Count,
		}
	},
}

func TestRecords(t *testing.T) {
	t.Parallel()
	conformance.TestRecords(t, databases)
}

func TestDo(t *testing.T) {
	t.Parallel()
	conformance.TestDo(t, databases)
}

func TestModel(t *testing.T) {
	t.Parallel()
	conformance.TestModel(t, databases)
}

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

var quiet = slog.New(slog.DiscardHandler)

type (
	work    = func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error)
	request = func(ctx context.Context, key idempotency.Key) (idempotency.Response, error)
)

func newChargePool(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool := pgtest.New(t)
	store, err := newPgStore(pool)
	if err != nil {
		t.Fatal(err)
	}
	if err := store.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), "CREATE TABLE charges (id bigserial PRIMARY KEY, cents int NOT NULL, note text NOT NULL)"); err != nil {
		t.Fatal(err)
	}
	return pool
}

func newPgStore(pool *pgxpool.Pool) (*idempotencypgx.Store, error) {
	manager, err := txretry.New(pool, txretry.Config{Logger: quiet})
	if err != nil {
		return nil, err
	}
	return idempotencypgx.New(manager, idempotencypgx.Config{Logger: quiet})
}

func proveCharge(t prove.TB, pool *pgxpool.Pool, start func(pool *pgxpool.Pool) (request, error)) {
	var mails atomic.Int64
	idempotencytest.Prove(t, txretrytest.Proof{
		Pool: pool, Reset: "TRUNCATE charges, holdfast_idempotency", Effects: func() int { return int(mails.Load()) },
		Rows: []string{"SELECT cents, note FROM charges"},
	}, func(pool *pgxpool.Pool) (request, error) {
		do, err := start(pool)
		return func(ctx context.Context, key idempotency.Key) (idempotency.Response, error) {
			return do(context.WithValue(ctx, mailer{}, &mails), key)
		}, err
	})
}

// mailer is the context key of the counter of mails.
type mailer struct{}

func insertCharge(ctx context.Context, db interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}, note string,
) (id int64, err error) {
	err = db.QueryRow(ctx, "INSERT INTO charges (cents, note) VALUES (4200, $1) RETURNING id", note).Scan(&id)
	return id, err
}

// charge answers with an id that differs in each attempt.
func charge(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
	id, err := insertCharge(ctx, tx, "")
	if err != nil {
		return idempotency.Response{}, err
	}
	return idempotency.JSON(http.StatusCreated, fmt.Sprint("charge ", id))
}

// byKey returns a process that calls DoKey.
func byKey(fn work) func(pool *pgxpool.Pool) (request, error) {
	return func(pool *pgxpool.Pool) (request, error) {
		store, err := newPgStore(pool)
		return func(ctx context.Context, key idempotency.Key) (idempotency.Response, error) {
			resp, _, err := store.DoKey(ctx, key, nil, fn)
			return resp, err
		}, err
	}
}

// byHTTP returns a process that serves requests.
func byHTTP(fn work) func(pool *pgxpool.Pool) (request, error) {
	return func(pool *pgxpool.Pool) (request, error) {
		store, err := newPgStore(pool)
		if err != nil {
			return nil, err
		}
		protect, err := idempotency.NewMiddleware(store, idempotency.UnsafeGlobalScope, idempotency.MiddlewareConfig{Logger: quiet})
		if err != nil {
			return nil, err
		}
		handler := protect(store.Handler(func(ctx context.Context, tx pgx.Tx, _ *http.Request) (idempotency.Response, error) {
			return fn(ctx, tx)
		}))
		return func(ctx context.Context, key idempotency.Key) (idempotency.Response, error) {
			r := httptest.NewRequestWithContext(ctx, http.MethodPost, "/charges", strings.NewReader("{}"))
			r.Header.Set(idempotency.Header, string(key))
			w := httptest.NewRecorder()
			handler.ServeHTTP(w, r)
			return idempotency.Response{Status: w.Code, Header: w.Header(), Body: w.Body.Bytes()}, nil
		}, nil
	}
}

// Correct code passes, on every path.
func TestProve(t *testing.T) {
	t.Parallel()
	for name, start := range map[string]func(*pgxpool.Pool) (request, error){
		"DoKey": byKey(charge),
		"HTTP":  byHTTP(charge),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			proveCharge(t, newChargePool(t), start)
		})
	}
}

// Each mistake is found, and the error names it.
func TestProveCatches(t *testing.T) {
	t.Parallel()
	type planted struct {
		start func(pool *pgxpool.Pool) (request, error)
		want  []string
	}
	for name, plant := range map[string]planted{
		"a write on the pool": {func(pool *pgxpool.Pool) (request, error) {
			return byKey(func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
				if _, err := insertCharge(ctx, pool, "log"); err != nil {
					return idempotency.Response{}, err
				}
				return charge(ctx, tx)
			})(pool)
		}, []string{"+ cents=4200 note=log", "Outside a transaction: INSERT INTO charges"}},
		"an answer that differs": {func(pool *pgxpool.Pool) (request, error) {
			ask, err := byKey(charge)(pool)
			return func(ctx context.Context, key idempotency.Key) (idempotency.Response, error) {
				resp, err := ask(ctx, key)
				resp.Body = fmt.Appendf(resp.Body, " at %d", time.Now().UnixNano())
				return resp, err
			}, err
		}, []string{"done, and asked for again", "two callers got different answers", "- 201 ", "change nothing afterwards"}},
		"every error a refusal": {byHTTP(func(ctx context.Context, tx pgx.Tx) (resp idempotency.Response, err error) {
			err = pgx.BeginFunc(ctx, tx, func(sp pgx.Tx) error {
				resp, err = charge(ctx, sp)
				return err
			})
			if err != nil && !tx.Conn().IsClosed() {
				return idempotency.JSON(http.StatusUnprocessableEntity, "refused")
			}
			return resp, err
		}), []string{"refused by the server as too slow", "- cents=4200", "swallowed the error"}},
		"a side effect": {byKey(func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			ctx.Value(mailer{}).(*atomic.Int64).Add(1)
			return charge(ctx, tx)
		}), []string{"Proof.Effects counts 2, 1 after"}},
		"a row of the attempt": {byHTTP(func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			_, err := insertCharge(ctx, tx, string(idempotency.NewKey()))
			return idempotency.Response{Status: http.StatusCreated}, err
		}), []string{"The values of note depend on the attempt"}},
		"a transaction that the function ends": {byKey(func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			_, err := tx.Exec(ctx, "COMMIT")
			return idempotency.Response{Status: http.StatusCreated}, err
		}), []string{"The code ends its transaction itself"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newChargePool(t)
			provetest.Caught(t, func(t prove.TB) { proveCharge(t, pool, plant.start) }, plant.want...)
		})
	}
}
