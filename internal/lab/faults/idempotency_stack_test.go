package faults_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry"
)

// steps counts what a request does on the wire: each write of either client, before and after,
// and each answer. At one of them a fault strikes.
type steps struct {
	fault func() // at step number at

	mu    sync.Mutex
	armed bool
	n, at int
}

func (s *steps) arm(at int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.armed, s.n, s.at = true, 0, at
}

// disarm returns how many steps there were.
func (s *steps) disarm() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.armed = false
	return s.n
}

func (s *steps) step() {
	s.mu.Lock()
	strike := false
	if s.armed {
		s.n++
		strike = s.n == s.at
	}
	s.mu.Unlock()
	if strike {
		s.fault()
	}
}

type steppedConn struct {
	net.Conn
	steps *steps
}

func (c steppedConn) Write(p []byte) (int, error) {
	c.steps.step()
	n, err := c.Conn.Write(p)
	c.steps.step()
	return n, err
}

func (c steppedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 {
		c.steps.step()
	}
	return n, err
}

// gates that a stack can have in front of the records.
const (
	redisGate    = "redis"
	postgresGate = "postgres"
	noGate       = "none"  // it cannot be asked: the records decide
	alone        = "alone" // there is none: Postgres alone
)

// stackJob says where a stack stands.
type stackJob struct {
	Database, Redis, Gate string
	Key                   idempotency.Key
	KillAt                int
}

const stackLease = 700 * time.Millisecond

// stack is a service on the two tiers.
type stack struct {
	handler http.Handler
	steps   *steps
	pool    *pgxpool.Pool
	client  *redis.Client
	address func() string // of Redis, asked for each connection; nil: the one of the URL
}

func migrateStack(t testing.TB, url string) {
	t.Helper()
	pool := pgtest.Pool(t, url, 2)
	manager, err := txretry.New(pool, txretry.Config{})
	must(t, err)
	store, err := idempotencypgx.New(manager, idempotencypgx.Config{})
	must(t, err)
	must(t, store.Migrate(t.Context()))
	_, err = pool.Exec(t.Context(), `CREATE TABLE effects (id bigserial PRIMARY KEY, key text NOT NULL)`)
	must(t, err)
}

func openStack(ctx context.Context, job stackJob, address func() string) (*stack, error) {
	s := &stack{steps: &steps{}, address: address}
	opts, err := redis.ParseURL(job.Redis)
	if err != nil {
		return nil, err
	}
	opts.Dialer = s.dialRedis
	opts.ContextTimeoutEnabled, opts.ReadTimeout, opts.DialTimeout = true, 2*time.Second, 2*time.Second
	s.client = redis.NewClient(opts)
	cfg, err := pgxpool.ParseConfig(job.Database)
	if err != nil {
		return nil, err
	}
	cfg.MaxConns = 8
	cfg.ConnConfig.DialFunc = s.dial
	if s.pool, err = pgxpool.NewWithConfig(ctx, cfg); err != nil {
		return nil, err
	}
	store, err := s.store(job.Gate, stackLease)
	if err != nil {
		return nil, err
	}
	return s, s.serve(store)
}

func (s *stack) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, network, addr)
	return steppedConn{conn, s.steps}, err
}

func (s *stack) dialRedis(ctx context.Context, network, addr string) (net.Conn, error) {
	if s.address != nil {
		addr = s.address()
	}
	return s.dial(ctx, network, addr)
}

func (s *stack) store(gate string, lease time.Duration) (*idempotencypgx.Store, error) {
	manager, err := txretry.New(s.pool, txretry.Config{})
	if err != nil {
		return nil, err
	}
	switch gate {
	case alone:
		return idempotencypgx.New(manager, idempotencypgx.Config{})
	case postgresGate:
		return idempotencypgx.New(manager, idempotencypgx.Config{Lease: lease})
	}
	front, err := idempotencyredis.New(s.client, idempotencyredis.Config{Lease: lease})
	if err != nil {
		return nil, err
	}
	if gate == noGate {
		return idempotencypgx.New(manager, idempotencypgx.Config{Gate: downGate{front}})
	}
	return idempotencypgx.New(manager, idempotencypgx.Config{Gate: front})
}

type downGate struct{ driver.Store }

func (downGate) Begin(context.Context, driver.Claim) (driver.BeginResult, error) {
	return driver.BeginResult{}, errors.New("the gate is down")
}

func (s *stack) serve(store *idempotencypgx.Store) error {
	protect, err := idempotency.NewMiddleware(store, idempotency.UnsafeGlobalScope, idempotency.MiddlewareConfig{Logger: quiet})
	if err != nil {
		return err
	}
	s.handler = protect(store.Handler(func(ctx context.Context, tx pgx.Tx, r *http.Request) (idempotency.Response, error) {
		var id int64
		err := tx.QueryRow(ctx, `INSERT INTO effects (key) VALUES ($1) RETURNING id`, r.Header.Get(idempotency.Header)).Scan(&id)
		if err != nil {
			return idempotency.Response{}, err
		}
		return idempotency.JSON(http.StatusCreated, fmt.Sprint("effect ", id))
	}))
	return nil
}

func (s *stack) close() {
	s.pool.Close()
	_ = s.client.Close()
}

func (s *stack) post(key idempotency.Key) *httptest.ResponseRecorder {
	r := httptest.NewRequest(http.MethodPost, "/effects", nil)
	r.Header.Set(idempotency.Header, string(key))
	rec := httptest.NewRecorder()
	s.handler.ServeHTTP(rec, r)
	return rec
}

// warm has both clients learn what they send, so that the steps of the next request are those of
// any request.
func (s *stack) warm() error {
	deadline := time.Now().Add(patience)
	for warmed := 0; warmed < 2; {
		switch rec := s.post(idempotency.NewKey()); {
		case rec.Code == http.StatusCreated:
			warmed++
		case rec.Code != http.StatusServiceUnavailable || time.Now().After(deadline):
			return fmt.Errorf("warm-up: %d %s", rec.Code, rec.Body)
		}
	}
	return nil
}

// untilAnswered is a client that asks again until it is told what came of its request.
func (s *stack) untilAnswered(t testing.TB, key idempotency.Key) (body string) {
	t.Helper()
	last := ""
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		rec := s.post(key)
		switch last = fmt.Sprint(rec.Code, " ", rec.Body); rec.Code {
		case http.StatusCreated:
			return rec.Body.String()
		case http.StatusConflict, http.StatusServiceUnavailable:
		default:
			t.Fatalf("answer %s", last)
		}
	}
	t.Fatalf("no answer; the last one was %s", last)
	return ""
}

// verify asks until there is an answer, and wants one effect, that answer now and later, and the
// answer that was given before, if one was.
func (s *stack) verify(t testing.TB, what string, key idempotency.Key, before string) {
	t.Helper()
	answer := s.untilAnswered(t, key)
	for range 2 {
		if again := s.untilAnswered(t, key); again != answer {
			t.Errorf("%s: answered %s, then %s", what, answer, again)
		}
	}
	if before != "" && before != answer {
		t.Errorf("%s: answered %s at first, then %s", what, before, answer)
	}
	var n int
	var id int64
	testenv.Eventually(t, func() error { // the pool may still have connections that a fault has ended, or silenced
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		return s.pool.QueryRow(ctx, `SELECT count(*), max(id) FROM effects WHERE key = $1`, string(key)).Scan(&n, &id)
	})
	if n != 1 || answer != fmt.Sprintf("%q", fmt.Sprint("effect ", id)) {
		t.Errorf("%s: %d effects, the last one %d; answer %s", what, n, id, answer)
	}
}
