package conformance

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/txretry"
)

// TestDo tests the methods Do and DoKey of an idempotencypgx.Store, behind a gate that
// forgets, which is what is left when the process dies between COMMIT and the gate's
// copy, and without a gate.
func TestDo(t *testing.T, b RecordsBackend) {
	b.run(t, "an answer outlives the gate", testGateLost)
	b.run(t, "the echo of an earlier effect", testEcho)
	b.run(t, "another request after the gate is lost", testReusedGateLost)
	b.run(t, "a failure leaves nothing", testRunFails)
	b.run(t, "a response that is not kept leaves nothing", testRunNotKept)
	b.run(t, "an answer too large to keep", testRunTooLarge)
	b.run(t, "an answer too large to keep, left to the middleware", testRunTooLargeUnsent)
	b.run(t, "COMMIT unknown, applied", testUnknownApplied)
	b.run(t, "COMMIT unknown, not applied", testUnknownNotApplied)
	b.run(t, "records that cannot be read", testRecordsDown)
	b.run(t, "a transaction that is run again", testRunRetried)
	b.run(t, "without a gate between them", testRunRivals)
	b.run(t, "outside HTTP", testRunKey)
	b.run(t, "requests at the same time", testRunStampede)
	b.run(t, "without the gate the records decide", testGateDown)
	b.run(t, "without the gate, outside HTTP", testRunKeyGateDown)
	b.run(t, "outside HTTP, an fn that failed is not run again", testRunKeyRunsOnce)
	b.run(t, "requests at the same time without the gate", testGateDownStampede)
	b.run(t, "an answer given without a transaction, without the gate", testGateDownRefusal)
	b.run(t, "a run that has lost its lease commits nothing", testRunLeaseLost)
	b.run(t, "the status decides what is kept", testStatusDecides)
	b.run(t, "outside HTTP, an error is no replay", testErrorIsNoReplay)
	b.run(t, "the records alone", testAlone)
	b.run(t, "the records alone, outside HTTP", testAloneKey)
	b.run(t, "the records alone, requests at the same time", testAloneStampede)
	b.run(t, "the records alone, an answer given without a transaction", testAloneRefusal)
}

// TestGate tests an idempotencypgx.Store behind the gate of a database: what a gate on another server can change
// of TestDo.
func TestGate(t *testing.T, b RecordsBackend) {
	b.run(t, "an answer outlives the gate", testGateLost)
	b.run(t, "requests at the same time", testRunStampede)
	b.run(t, "without the gate the records decide", testGateDown)
	b.run(t, "a run that has lost its lease commits nothing", testRunLeaseLost)
}

// work is the function of a transaction.
type work func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error)

// shop is a service on a database.
type shop struct {
	db      Database
	cfg     idempotency.MiddlewareConfig
	refunds atomic.Int32

	mu  sync.Mutex
	err error // of the last Do that failed
}

func newShop(db Database, cfg idempotency.MiddlewareConfig) *shop {
	s := &shop{db: db, cfg: cfg}
	s.cfg.OnReplay = func(*http.Request) { s.refunds.Add(1) }
	return s
}

// store is on the records of the database, behind gate.
func (db Database) store(t *testing.T, gate driver.Store) *idempotencypgx.Store {
	t.Helper()
	store, err := idempotencypgx.New(db.Transactor, idempotencypgx.Config{Gate: gate, Records: db.Records})
	if err != nil {
		t.Fatal(err)
	}
	return store
}

// behind returns the shop behind a new middleware. fn is the business transaction.
func (s *shop) behind(t *testing.T, gate driver.Store, fn work) *service {
	t.Helper()
	store := s.db.store(t, gate)
	return newService(t, store, s.cfg, func(w http.ResponseWriter, r *http.Request) {
		resp, err := store.Do(r.Context(), fn)
		if err != nil {
			s.mu.Lock()
			s.err = err
			s.mu.Unlock()
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		resp.Send(w)
	})
}

// order has an effect and answers with its number.
func (s *shop) order(key idempotency.Key) work {
	var n atomic.Int32
	return func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		if err := s.db.Add(ctx, tx, string(key)); err != nil {
			return idempotency.Response{}, err
		}
		return idempotency.JSON(http.StatusCreated, fmt.Sprintf("run %d", n.Add(1)))
	}
}

func (s *shop) once(t *testing.T, key idempotency.Key) {
	t.Helper()
	if n := s.db.Count(t, string(key)); n != 1 {
		t.Errorf("%d effects, want 1", n)
	}
}

func testGateLost(t *testing.T, db Database) {
	s, key := newShop(db, idempotency.MiddlewareConfig{}), idempotency.NewKey()
	fn, gate := s.order(key), db.gate(t)
	first := s.behind(t, gate, fn).post(key)
	if first.is(t, 201, ""); first.replayed() {
		t.Error("the first answer is marked")
	}
	fresh := db.gate(t)
	for _, gate := range []driver.Store{gate, fresh, fresh} {
		again := s.behind(t, gate, fn).post(key)
		if again.is(t, 201, ""); again.body != first.body || !again.replayed() {
			t.Errorf("again: %+v; want %q, marked", again, first.body)
		}
	}
	if s.once(t, key); s.refunds.Load() != 3 {
		t.Errorf("%d refunds, want 3", s.refunds.Load())
	}
}

// testEcho: the second run finds the effect of the first and takes it for a
// reason to refuse.
func testEcho(t *testing.T, db Database) {
	for name, refusal := range map[string]func() (idempotency.Response, error){
		"error":     func() (idempotency.Response, error) { return idempotency.Response{}, errors.New("seat taken") },
		"final":     func() (idempotency.Response, error) { return idempotency.JSON(http.StatusConflict, "seat taken") },
		"not final": func() (idempotency.Response, error) { return idempotency.JSON(http.StatusTooManyRequests, "later") },
	} {
		s, key := newShop(db, idempotency.MiddlewareConfig{}), idempotency.NewKey()
		first := s.behind(t, db.gate(t), s.order(key)).post(key)
		again := s.behind(t, db.gate(t), func(context.Context, pgx.Tx) (idempotency.Response, error) {
			return refusal()
		}).post(key)
		if again.is(t, 201, ""); again.body != first.body || !again.replayed() {
			t.Errorf("%s: %+v; want the first answer %q", name, again, first.body)
		}
		s.once(t, key)
	}
}

func testReusedGateLost(t *testing.T, db Database) {
	s, key := newShop(db, idempotency.MiddlewareConfig{}), idempotency.NewKey()
	s.behind(t, db.gate(t), s.order(key)).post(key).is(t, 201, "")
	gate := db.gate(t)
	other := s.behind(t, gate, s.order(key))
	for range 2 {
		other.do(request{body: `{"other":1}`}.with(key)).is(t, 422, "IDEMPOTENCY_KEY_REUSED")
	}
	if !errors.Is(s.err, idempotency.ErrKeyReused) {
		t.Errorf("Do = %v; want ErrKeyReused", s.err)
	}
	other.post(key).is(t, 201, "")
	s.once(t, key)
}

func testRunFails(t *testing.T, db Database) {
	s, key, boom := newShop(db, idempotency.MiddlewareConfig{}), idempotency.NewKey(), errors.New("boom")
	gate := db.gate(t)
	s.behind(t, gate, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		return idempotency.Response{}, errors.Join(boom, db.Add(ctx, tx, string(key)))
	}).post(key).is(t, 503, "")
	if !errors.Is(s.err, boom) {
		t.Errorf("Do = %v; want fn's error", s.err)
	}
	s.behind(t, gate, s.order(key)).post(key).is(t, 201, "")
	s.once(t, key)
}

func testRunNotKept(t *testing.T, db Database) {
	s, key := newShop(db, idempotency.MiddlewareConfig{}), idempotency.NewKey()
	gate := db.gate(t)
	s.behind(t, gate, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		if err := db.Add(ctx, tx, string(key)); err != nil {
			return idempotency.Response{}, err
		}
		return idempotency.JSON(http.StatusTooManyRequests, "later")
	}).post(key).is(t, 429, "")
	s.behind(t, gate, s.order(key)).post(key).is(t, 201, "")
	s.once(t, key)
}

func testRunTooLarge(t *testing.T, db Database) {
	s, key := newShop(db, idempotency.MiddlewareConfig{MaxResponseBytes: 100}), idempotency.NewKey()
	gate := db.gate(t)
	fn := func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		return idempotency.Response{Status: 201, Body: []byte(strings.Repeat("x", 101))}, db.Add(ctx, tx, string(key))
	}
	first := s.behind(t, gate, fn).post(key)
	if first.is(t, 201, ""); len(first.body) != 101 {
		t.Errorf("first answer %q", first.body)
	}
	for _, gate := range []driver.Store{gate, db.gate(t)} {
		s.behind(t, gate, fn).post(key).is(t, 409, "IDEMPOTENCY_RESULT_UNAVAILABLE")
	}
	s.once(t, key)
}

// The middleware has nothing to send if the handler leaves that to it.
func testRunTooLargeUnsent(t *testing.T, db Database) {
	s, key := newShop(db, idempotency.MiddlewareConfig{MaxResponseBytes: 100}), idempotency.NewKey()
	store := db.store(t, db.gate(t))
	unsent := newService(t, store, s.cfg, func(_ http.ResponseWriter, r *http.Request) {
		_, err := store.Do(r.Context(), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			return idempotency.Response{Status: 201, Body: []byte(strings.Repeat("x", 101))}, db.Add(ctx, tx, string(key))
		})
		must(t, "Do", err)
	})
	for range 2 {
		unsent.post(key).is(t, 409, "IDEMPOTENCY_RESULT_UNAVAILABLE")
	}
	s.once(t, key)
}

func testRunRivals(t *testing.T, db Database) {
	s, key := newShop(db, idempotency.MiddlewareConfig{}), idempotency.NewKey()
	fn := s.order(key)
	var mu sync.Mutex
	bodies, fresh := map[string]int{}, 0
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for { // a client asks again after a 503
				resp, replayed, err := runAlone(t, db, key, fn)
				if _, busy := errors.AsType[*txretry.LockTimeoutError](err); busy {
					continue
				}
				if err != nil {
					t.Errorf("Do: %v", err)
					return
				}
				mu.Lock()
				defer mu.Unlock()
				if bodies[string(resp.Body)]++; !replayed {
					fresh++
				}
				return
			}
		})
	}
	wg.Wait()
	if s.once(t, key); len(bodies) != 1 || fresh != 1 {
		t.Errorf("answers %v, %d of them fresh; want one answer, fresh once", bodies, fresh)
	}
}

// runAlone runs fn behind a gate of its own: the gates know nothing of
// each other.
func runAlone(t *testing.T, db Database, key idempotency.Key, fn work) (idempotency.Response, bool, error) {
	return db.store(t, db.gate(t)).DoKey(background, key, []string{"order"}, fn)
}

func testRunKey(t *testing.T, db Database) {
	testKey(t, db, db.store(t, db.gate(t)))
}

// testKey has a key done outside HTTP.
func testKey(t *testing.T, db Database, store *idempotencypgx.Store) {
	s, key, request := newShop(db, idempotency.MiddlewareConfig{}), idempotency.NewKey(), []string{"order"}
	if _, err := store.Do(t.Context(), s.order(key)); !errors.Is(err, idempotency.ErrNoClaim) {
		t.Errorf("Do without a claim = %v; want ErrNoClaim", err)
	}
	resp, replayed, err := store.DoKey(t.Context(), key, request, func(context.Context, pgx.Tx) (idempotency.Response, error) {
		return idempotency.JSON(http.StatusServiceUnavailable, "later")
	})
	if err != nil || replayed || resp.Status != 503 {
		t.Errorf("not kept: %+v, %v, %v", resp, replayed, err)
	}
	fn := s.order(key)
	for i := range 2 {
		resp, replayed, err := store.DoKey(t.Context(), key, request, fn)
		if err != nil || replayed != (i > 0) || string(resp.Body) != `"run 1"` {
			t.Errorf("call %d: %s, %v, %v", i, resp.Body, replayed, err)
		}
	}
	if _, _, err := store.DoKey(t.Context(), key, []string{"other"}, fn); !errors.Is(err, idempotency.ErrKeyReused) {
		t.Errorf("other request: %v; want ErrKeyReused", err)
	}
	s.once(t, key)
}
