package faults_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
	"github.com/holdfast-go/holdfast/txretry"
)

// The gates that a service can have before its records in Postgres.
const (
	redisGate    = "Redis"
	failingGate  = "failing" // it never answers: the records decide
	postgresGate = "Postgres"
	noGate       = "none"
)

// idempotencyPoints are those where a service is killed: in the transaction of a request, when that has committed,
// and when the gate has the answer too.
var idempotencyPoints = []string{"effect written", "committed", "answered"}

// killLease is how long the key of a service that is killed stays in use.
const killLease = 500 * time.Millisecond

// serviceJob is a service on Redis and Postgres, and one request to it.
type serviceJob struct {
	Database, Redis, Gate string
	Key                   idempotency.Key
	Crash                 crash
}

func migrateService(t testing.TB, url string) {
	t.Helper()
	pool := pgtest.Pool(t, url, 2)
	store, err := serviceStore(pool, nil, noGate, 0)
	must(t, err)
	must(t, store.Migrate(t.Context()))
	_, err = pool.Exec(t.Context(), `CREATE TABLE effects (id bigserial PRIMARY KEY, key text NOT NULL)`)
	must(t, err)
}

// serviceStore returns records in Postgres behind a gate.
func serviceStore(pool *pgxpool.Pool, front driver.Store, gate string, lease time.Duration) (*idempotencypgx.Store, error) {
	manager, err := txretry.New(pool, txretry.Config{Logger: quiet})
	if err != nil {
		return nil, err
	}
	cfg := idempotencypgx.Config{}
	switch gate {
	case postgresGate:
		cfg.Lease = lease
	case redisGate:
		cfg.Gate = front
	case failingGate:
		cfg.Gate = deadGate{front}
	}
	return idempotencypgx.New(manager, cfg)
}

type deadGate struct{ driver.Store }

func (deadGate) Begin(context.Context, driver.Claim) (driver.BeginResult, error) {
	return driver.BeginResult{}, errors.New("the gate is down")
}

// open returns the handler of the service, and what ends its clients.
func (j serviceJob) open(ctx context.Context) (http.Handler, func(), error) {
	client, err := openRedis(j.Redis)
	if err != nil {
		return nil, nil, err
	}
	pool, err := pgxpool.New(ctx, j.Database)
	if err != nil {
		return nil, nil, err
	}
	front, err := idempotencyredis.New(client, idempotencyredis.Config{Lease: killLease})
	if err != nil {
		return nil, nil, err
	}
	store, err := serviceStore(pool, front, j.Gate, killLease)
	if err != nil {
		return nil, nil, err
	}
	protect, err := idempotency.NewMiddleware(store, idempotency.UnsafeGlobalScope, idempotency.MiddlewareConfig{Logger: quiet})
	if err != nil {
		return nil, nil, err
	}
	crash := &j.Crash
	buy := store.Handler(func(ctx context.Context, tx pgx.Tx, r *http.Request) (idempotency.Response, error) {
		var id int64
		err := tx.QueryRow(ctx, `INSERT INTO effects (key) VALUES ($1) RETURNING id`, r.Header.Get(idempotency.Header)).Scan(&id)
		if err != nil {
			return idempotency.Response{}, err
		}
		crash.pass("effect written")
		return idempotency.JSON(http.StatusCreated, fmt.Sprint("effect ", id))
	})
	handler := protect(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		buy.ServeHTTP(w, r)
		crash.pass("committed")
	}))
	return handler, func() {
		pool.Close()
		_ = client.Close()
	}, nil
}

// idempotencyRole sends one request to a service, and dies on the way.
func idempotencyRole(ctx context.Context, text []byte) error {
	var j serviceJob
	if err := json.Unmarshal(text, &j); err != nil {
		return err
	}
	handler, end, err := j.open(ctx)
	if err != nil {
		return err
	}
	defer end()
	j.Crash.After = 0 // there is one request
	code, body := post(handler, j.Key)
	j.Crash.pass("answered")
	return fmt.Errorf("answer %d %s", code, body)
}

func post(handler http.Handler, key idempotency.Key) (code int, body string) {
	r := httptest.NewRequest(http.MethodPost, "/effects", nil)
	r.Header.Set(idempotency.Header, string(key))
	rec := httptest.NewRecorder()
	handler.ServeHTTP(rec, r)
	return rec.Code, rec.Body.String()
}

// service is a work: a request, which is sent to a process that is killed, then to this one.
type service struct {
	t       *testing.T
	job     serviceJob
	pool    *pgxpool.Pool
	handler http.Handler
}

func idempotencyBehind(gate string) func(*testing.T) work {
	return func(t *testing.T) work {
		s := &service{t: t, job: serviceJob{Database: pgtest.URL(t), Redis: redistest.URL(t), Gate: gate}}
		migrateService(t, s.job.Database)
		s.pool = pgtest.Pool(t, s.job.Database, 2)
		var end func()
		var err error
		s.handler, end, err = s.job.open(t.Context())
		must(t, err)
		t.Cleanup(end)
		return s
	}
}

func (s *service) prepare() { s.job.Key = idempotency.NewKey() }

func (s *service) spawn(c crash) *child {
	job := s.job
	job.Crash = crash{Point: c.Point}
	return spawn(s.t, "idempotency", job)
}

// finish is the client that repeats its request: it has one effect, and one answer from now on.
func (s *service) finish() {
	s.t.Helper()
	answer := s.answer()
	if again := s.answer(); again != answer {
		s.t.Errorf("answered %s, then %s", answer, again)
	}
	var n int
	var id int64
	must(s.t, s.pool.QueryRow(s.t.Context(), `SELECT count(*), max(id) FROM effects WHERE key = $1`, string(s.job.Key)).Scan(&n, &id))
	if n != 1 || answer != fmt.Sprintf("%q", fmt.Sprint("effect ", id)) {
		s.t.Errorf("%d effects, the last one %d; answer %s", n, id, answer)
	}
}

// answer repeats the request until it is answered. The key is in use until its lease ends.
func (s *service) answer() (body string) {
	s.t.Helper()
	testenv.Eventually(s.t, func() error {
		var code int
		if code, body = post(s.handler, s.job.Key); code != http.StatusCreated {
			return fmt.Errorf("answer %d %s", code, body)
		}
		return nil
	})
	return body
}
