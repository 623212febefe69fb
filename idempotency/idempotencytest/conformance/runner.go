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
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/txretry"
)

// TestRunner tests the two tiers on a database, behind a gate that forgets:
// what is left when the process dies between COMMIT and the gate's copy.
func TestRunner(t *testing.T, b RecordsBackend) {
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
}

// shop is a service on the two tiers.
type shop struct {
	db      Database
	runner  *idempotencypgx.Runner
	refunds atomic.Int32

	mu  sync.Mutex
	err error // of the last Run that failed
}

func newShop(t *testing.T, db Database, cfg idempotencypgx.RunnerConfig) *shop {
	t.Helper()
	runner, err := idempotencypgx.NewRunner(db.Transactor, db.Records, db.gate(t), cfg)
	must(t, "NewRunner", err)
	return &shop{db: db, runner: runner}
}

// behind returns the shop behind a new gate. fn is the business transaction.
func (s *shop) behind(t *testing.T, gate idempotency.Store, fn idempotencypgx.Func) *service {
	t.Helper()
	return newService(t, gate, idempotency.MiddlewareConfig{
		Fallback: s.runner.Fallback(),
		OnReplay: func(*http.Request) { s.refunds.Add(1) },
	}, func(w http.ResponseWriter, r *http.Request) {
		resp, err := s.runner.Run(r.Context(), fn)
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
func (s *shop) order(key idempotency.Key) idempotencypgx.Func {
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
	s, key := newShop(t, db, idempotencypgx.RunnerConfig{}), idempotency.NewKey()
	fn, gate := s.order(key), db.gate(t)
	first := s.behind(t, gate, fn).post(key)
	if first.is(t, 201, ""); first.replayed() {
		t.Error("the first answer is marked")
	}
	fresh := db.gate(t)
	for _, gate := range []idempotency.Store{gate, fresh, fresh} {
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
		s, key := newShop(t, db, idempotencypgx.RunnerConfig{}), idempotency.NewKey()
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
	s, key := newShop(t, db, idempotencypgx.RunnerConfig{}), idempotency.NewKey()
	s.behind(t, db.gate(t), s.order(key)).post(key).is(t, 201, "")
	gate := db.gate(t)
	other := s.behind(t, gate, s.order(key))
	for range 2 {
		other.do(request{body: `{"other":1}`}.with(key)).is(t, 422, idempotency.CodeKeyReused)
	}
	if !errors.Is(s.err, idempotency.ErrKeyReused) {
		t.Errorf("Run = %v; want ErrKeyReused", s.err)
	}
	other.post(key).is(t, 201, "")
	s.once(t, key)
}

func testRunFails(t *testing.T, db Database) {
	s, key, boom := newShop(t, db, idempotencypgx.RunnerConfig{}), idempotency.NewKey(), errors.New("boom")
	gate := db.gate(t)
	s.behind(t, gate, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		return idempotency.Response{}, errors.Join(boom, db.Add(ctx, tx, string(key)))
	}).post(key).is(t, 503, "")
	if !errors.Is(s.err, boom) {
		t.Errorf("Run = %v; want fn's error", s.err)
	}
	s.behind(t, gate, s.order(key)).post(key).is(t, 201, "")
	s.once(t, key)
}

func testRunNotKept(t *testing.T, db Database) {
	s, key := newShop(t, db, idempotencypgx.RunnerConfig{}), idempotency.NewKey()
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
	s, key := newShop(t, db, idempotencypgx.RunnerConfig{MaxResponseBytes: 10}), idempotency.NewKey()
	gate := db.gate(t)
	fn := func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		return idempotency.Response{Status: 201, Body: []byte(strings.Repeat("x", 11))}, db.Add(ctx, tx, string(key))
	}
	first := s.behind(t, gate, fn).post(key)
	if first.is(t, 201, ""); len(first.body) != 11 {
		t.Errorf("first answer %q", first.body)
	}
	for _, gate := range []idempotency.Store{gate, db.gate(t)} {
		s.behind(t, gate, fn).post(key).is(t, 409, idempotency.CodeResultUnavailable)
	}
	s.once(t, key)
}

// The middleware has nothing to send if the handler leaves that to it.
func testRunTooLargeUnsent(t *testing.T, db Database) {
	s, key := newShop(t, db, idempotencypgx.RunnerConfig{MaxResponseBytes: 10}), idempotency.NewKey()
	unsent := newService(t, db.gate(t), idempotency.MiddlewareConfig{}, func(_ http.ResponseWriter, r *http.Request) {
		_, err := s.runner.Run(r.Context(), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			return idempotency.Response{Status: 201, Body: []byte(strings.Repeat("x", 11))}, db.Add(ctx, tx, string(key))
		})
		must(t, "Run", err)
	})
	for range 2 {
		unsent.post(key).is(t, 409, idempotency.CodeResultUnavailable)
	}
	s.once(t, key)
}

func testRunRivals(t *testing.T, db Database) {
	s, key := newShop(t, db, idempotencypgx.RunnerConfig{}), idempotency.NewKey()
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
					t.Errorf("Run: %v", err)
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
func runAlone(t *testing.T, db Database, key idempotency.Key, fn idempotencypgx.Func) (idempotency.Response, bool, error) {
	runner, err := idempotencypgx.NewRunner(db.Transactor, db.Records, db.gate(t), idempotencypgx.RunnerConfig{})
	if err != nil {
		return idempotency.Response{}, false, err
	}
	return runner.RunKey(background, key, idempotency.FingerprintOf("order"), fn)
}

func testRunKey(t *testing.T, db Database) {
	s, key, fp := newShop(t, db, idempotencypgx.RunnerConfig{}), idempotency.NewKey(), idempotency.FingerprintOf("order")
	if _, err := s.runner.Run(t.Context(), s.order(key)); !errors.Is(err, idempotency.ErrNoClaim) {
		t.Errorf("Run without a claim = %v; want ErrNoClaim", err)
	}
	resp, replayed, err := s.runner.RunKey(t.Context(), key, fp, func(context.Context, pgx.Tx) (idempotency.Response, error) {
		return idempotency.JSON(http.StatusServiceUnavailable, "later")
	})
	if err != nil || replayed || resp.Status != 503 {
		t.Errorf("not kept: %+v, %v, %v", resp, replayed, err)
	}
	fn := s.order(key)
	for i := range 2 {
		resp, replayed, err := s.runner.RunKey(t.Context(), key, fp, fn)
		if err != nil || replayed != (i > 0) || string(resp.Body) != `"run 1"` {
			t.Errorf("call %d: %s, %v, %v", i, resp.Body, replayed, err)
		}
	}
	if _, _, err := s.runner.RunKey(t.Context(), key, idempotency.FingerprintOf("other"), fn); !errors.Is(err, idempotency.ErrKeyReused) {
		t.Errorf("other request: %v; want ErrKeyReused", err)
	}
	s.once(t, key)
}
