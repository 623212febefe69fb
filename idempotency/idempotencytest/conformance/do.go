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
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	pgxdriver "github.com/holdfast-go/holdfast/idempotency/idempotencypgx/driver"
	"github.com/holdfast-go/holdfast/txretry"
)

// TestDo tests the methods Do and DoKey of an idempotencypgx.Store, without a gate and behind a gate that loses its
// records. That is the state after the process dies between COMMIT and the gate's copy.
func TestDo(t *testing.T, b RecordsBackend) {
	b.run(t, "an answer outlives the gate", testGateLost)
	b.run(t, "a failure caused by an earlier effect", testEcho)
	b.run(t, "another request after the gate is lost", testReusedGateLost)
	b.run(t, "a failure leaves nothing", testRunFails)
	b.run(t, "a response that is not kept leaves nothing", testRunNotKept)
	b.run(t, "an answer too large to keep", testRunTooLarge)
	b.run(t, "an answer too large to keep, left to the middleware", testRunTooLargeUnsent)
	b.run(t, "COMMIT unknown, applied", testUnknownApplied)
	b.run(t, "COMMIT unknown, not applied", testUnknownNotApplied)
	b.run(t, "records that cannot be read", testRecordsDown)
	b.run(t, "a transaction that is run again", testRunRetried)
	b.run(t, "concurrent requests, each with its own gate", testRunRivals)
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

// TestGate tests an idempotencypgx.Store behind the gate of a database: the part of TestDo that a gate on another
// server can change.
func TestGate(t *testing.T, b RecordsBackend) {
	b.run(t, "an answer outlives the gate", testGateLost)
	b.run(t, "requests at the same time", testRunStampede)
	b.run(t, "without the gate the records decide", testGateDown)
	b.run(t, "a run that has lost its lease commits nothing", testRunLeaseLost)
}

// work is the function that runs in a transaction.
type work func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error)

// shop is a service on a database.
type shop struct {
	db      Database
	cfg     idempotency.MiddlewareConfig
	refunds atomic.Int32

	mu  sync.Mutex
	err error // the error of the last failed Do
}

func newShop(db Database, cfg idempotency.MiddlewareConfig) *shop {
	s := &shop{db: db, cfg: cfg}
	s.cfg.OnReplay = func(*http.Request) { s.refunds.Add(1) }
	return s
}

// store returns a store with the records of the database, behind gate.
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

// order returns work that has an effect and answers with the number of its run.
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

// testEcho: the second run finds the effect of the first run and therefore rejects the request.
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

// If the handler leaves the answer to the middleware, the middleware has nothing to send.
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
			for { // a client retries after a 503
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

// runAlone runs fn behind its own empty gate.
func runAlone(t *testing.T, db Database, key idempotency.Key, fn work) (idempotency.Response, bool, error) {
	return db.store(t, db.gate(t)).DoKey(background, key, []string{"order"}, fn)
}

func testRunKey(t *testing.T, db Database) {
	testKey(t, db, db.store(t, db.gate(t)))
}

// testKey uses a key outside HTTP.
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

// gone is a gate that is unavailable.
type gone struct{}

var errGone = errors.New("gate is down")

func (gone) Begin(context.Context, driver.Claim) (driver.BeginResult, error) {
	return driver.BeginResult{}, errGone
}

func (gone) Extend(context.Context, driver.Claim) error { return errGone }

func (gone) Complete(context.Context, driver.Claim, driver.Response) error { return errGone }

func (gone) Release(context.Context, driver.Claim) error { return errGone }

// stampede sends concurrent requests with one key until each has its answer. It checks that there is one effect and
// one answer.
func (s *shop) stampede(t *testing.T, gate driver.Store, clients int) {
	t.Helper()
	key := idempotency.NewKey()
	service := s.behind(t, gate, s.order(key))
	var fresh atomic.Int32
	var bodies sync.Map
	var wg sync.WaitGroup
	for range clients {
		wg.Go(func() {
			for ; ; <-time.After(time.Millisecond) {
				r := service.post(key)
				if r.status == http.StatusCreated {
					bodies.Store(r.body, true)
					if !r.replayed() {
						fresh.Add(1)
					}
					return
				}
				if r.status != http.StatusConflict && r.status != http.StatusServiceUnavailable {
					t.Errorf("answer %d %s", r.status, r.body)
					return
				}
			}
		})
	}
	wg.Wait()
	answers := 0
	bodies.Range(func(any, any) bool { answers++; return true })
	if s.once(t, key); answers != 1 || fresh.Load() != 1 {
		t.Errorf("%d answers, %d of them fresh; want 1 and 1", answers, fresh.Load())
	}
}

func testRunStampede(t *testing.T, db Database) {
	s, gate := newShop(db, idempotency.MiddlewareConfig{}), db.gate(t)
	for range 5 {
		s.stampede(t, gate, 16)
	}
}

func testGateDownStampede(t *testing.T, db Database) {
	s := newShop(db, idempotency.MiddlewareConfig{})
	for range 3 {
		s.stampede(t, gone{}, 8)
	}
}

func testAloneStampede(t *testing.T, db Database) {
	s := newShop(db, idempotency.MiddlewareConfig{})
	for range 3 {
		s.stampede(t, nil, 8)
	}
}

// testAlone: Postgres alone is enough.
func testAlone(t *testing.T, db Database) {
	s, key := newShop(db, idempotency.MiddlewareConfig{}), idempotency.NewKey()
	service := s.behind(t, nil, s.order(key))
	for i := range 3 {
		if r := service.post(key); r.status != 201 || r.body != `"run 1"` || r.replayed() != (i > 0) {
			t.Errorf("request %d: %+v", i, r)
		}
		service.do(request{body: `{"other":1}`}.with(key)).is(t, 422, "IDEMPOTENCY_KEY_REUSED")
	}
	if s.once(t, key); s.refunds.Load() != 2 {
		t.Errorf("%d refunds, want 2", s.refunds.Load())
	}
}

func testAloneKey(t *testing.T, db Database) { testKey(t, db, db.store(t, nil)) }

// testGateDown switches from a gate that works to one that is down, and back.
func testGateDown(t *testing.T, db Database) {
	s, gate := newShop(db, idempotency.MiddlewareConfig{}), db.gate(t)
	before, during := idempotency.NewKey(), idempotency.NewKey()
	s.behind(t, gate, s.order(before)).post(before).is(t, 201, "")
	first := s.behind(t, gone{}, s.order(during)).post(during)
	if first.is(t, 201, ""); first.replayed() {
		t.Error("the first answer is marked")
	}
	for i, gate := range []driver.Store{gone{}, gate, gone{}, gate} {
		for _, key := range []idempotency.Key{before, during} {
			service := s.behind(t, gate, s.order(key))
			if again := service.post(key); again.status != 201 || again.body != `"run 1"` || !again.replayed() {
				t.Errorf("%d: %+v; want the first answer", i, again)
			}
			service.do(request{body: `{"other":1}`}.with(key)).is(t, 422, "IDEMPOTENCY_KEY_REUSED")
		}
	}
	s.once(t, before)
	s.once(t, during)
}

func testRunKeyGateDown(t *testing.T, db Database) {
	store := db.store(t, gone{})
	s, key := newShop(db, idempotency.MiddlewareConfig{}), idempotency.NewKey()
	fn := s.order(key)
	for i := range 2 {
		resp, replayed, err := store.DoKey(t.Context(), key, []string{"order"}, fn)
		if err != nil || replayed != (i > 0) || string(resp.Body) != `"run 1"` {
			t.Errorf("call %d: %s, %v, %v", i, resp.Body, replayed, err)
		}
	}
	s.once(t, key)
}

// testGateDownRefusal: some handlers answer without a transaction.
func testGateDownRefusal(t *testing.T, db Database) { testRefusal(t, db, gone{}) }

func testAloneRefusal(t *testing.T, db Database) { testRefusal(t, db, nil) }

func testRefusal(t *testing.T, db Database, gate driver.Store) {
	s, key, runs := newShop(db, idempotency.MiddlewareConfig{}), idempotency.NewKey(), 0
	service := newService(t, db.store(t, gate), idempotency.MiddlewareConfig{},
		func(w http.ResponseWriter, _ *http.Request) {
			runs++
			w.WriteHeader(http.StatusNotFound)
			fmt.Fprintf(w, "run %d", runs)
		})
	for i := range 3 {
		if r := service.post(key); r.status != 404 || r.body != "run 1" || r.replayed() != (i > 0) {
			t.Errorf("request %d: %+v", i, r)
		}
	}
	s.behind(t, db.gate(t), s.order(key)).post(key).is(t, 404, "") // the record prevents an effect
	if n := db.Count(t, string(key)); n != 0 {
		t.Errorf("%d effects, want none", n)
	}
}

// hasty is a gate whose leases are renewed early.
type hasty struct{ driver.Store }

func (h hasty) Begin(ctx context.Context, c driver.Claim) (driver.BeginResult, error) {
	out, err := h.Store.Begin(ctx, c)
	if out.State == driver.Acquired {
		out.Lease = 300 * time.Millisecond // renewed after a third of this
	}
	return out, err
}

func testRunLeaseLost(t *testing.T, db Database) {
	for what, end := range map[string]func(ctx context.Context) error{
		"returns nil":       func(context.Context) error { return nil },
		"returns ctx.Err":   func(ctx context.Context) error { return ctx.Err() },
		"returns the cause": context.Cause,
	} {
		s, key, gate := newShop(db, idempotency.MiddlewareConfig{}), idempotency.NewKey(), db.gate(t)
		s.behind(t, hasty{gate}, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			if err := db.Add(ctx, tx, string(key)); err != nil {
				return idempotency.Response{}, err
			}
			claim, _ := driver.ClaimFrom(ctx)
			must(t, "Release", gate.Release(context.WithoutCancel(ctx), claim)) // as if the gate had lost the key; a renewal may come first
			<-ctx.Done()
			return idempotency.Response{Status: 201}, end(ctx)
		}).post(key).is(t, 503, "")
		if n := db.Count(t, string(key)); n != 0 || !errors.Is(s.err, idempotency.ErrLeaseLost) {
			t.Errorf("fn %s: %d effects, Do = %v; want none and ErrLeaseLost", what, n, s.err)
		}
		s.behind(t, gate, s.order(key)).post(key).is(t, 201, "")
		s.once(t, key)
	}
}

// An fn that fails because its own store is down has run. The gate was available.
func testRunKeyRunsOnce(t *testing.T, db Database) {
	runs := 0
	_, _, err := db.store(t, db.gate(t)).DoKey(t.Context(), idempotency.NewKey(), []string{"order"},
		func(ctx context.Context, _ pgx.Tx) (idempotency.Response, error) {
			runs++
			idempotency.MarkEffect(ctx)
			return idempotency.Response{}, fmt.Errorf("payment: %w", idempotency.ErrStoreUnavailable)
		})
	if runs != 1 || !errors.Is(err, idempotency.ErrStoreUnavailable) {
		t.Errorf("%d runs, error %v; want one, and the error of fn", runs, err)
	}
}

// lossy loses the answer to COMMIT.
type lossy struct {
	txretry.Transactor
	applied bool
}

func (l lossy) DoWith(ctx context.Context, opts txretry.Options, fn func(context.Context, pgx.Tx) error) error {
	aborted := errors.New("aborted")
	err := l.Transactor.DoWith(ctx, opts, func(ctx context.Context, tx pgx.Tx) error {
		if err := fn(ctx, tx); err != nil || l.applied {
			return err
		}
		return aborted
	})
	if err == nil || errors.Is(err, aborted) {
		return &txretry.CommitUnknownError{Err: errors.New("connection lost")}
	}
	return err
}

func testUnknownApplied(t *testing.T, db Database) {
	key := idempotency.NewKey()
	lost := db
	lost.Transactor, lost.Records = lossy{db.Transactor, true}, committing{db.Records}
	s, gate := newShop(lost, idempotency.MiddlewareConfig{}), db.gate(t)
	first := s.behind(t, gate, s.order(key)).post(key)
	if first.is(t, 201, ""); first.replayed() {
		t.Error("the first answer is marked")
	}
	if again := s.behind(t, gate, s.order(key)).post(key); again.body != first.body || !again.replayed() {
		t.Errorf("again: %+v; want %q", again, first.body)
	}
	s.once(t, key)
}

// committing has records that Lookup does not see yet.
type committing struct{ pgxdriver.Records }

func (committing) Lookup(context.Context, driver.Key) (pgxdriver.Record, bool, error) {
	return pgxdriver.Record{}, false, nil
}

func testUnknownNotApplied(t *testing.T, db Database) {
	key := idempotency.NewKey()
	lost := db
	lost.Transactor = lossy{db.Transactor, false}
	s, gate := newShop(lost, idempotency.MiddlewareConfig{}), db.gate(t)
	s.behind(t, gate, s.order(key)).post(key).is(t, 503, "")
	unknown := (*txretry.CommitUnknownError)(nil)
	if !errors.Is(s.err, idempotencypgx.ErrNotCommitted) || errors.As(s.err, &unknown) {
		t.Errorf("Do = %v; want ErrNotCommitted alone", s.err)
	}
	s = newShop(db, idempotency.MiddlewareConfig{})
	s.behind(t, gate, s.order(key)).post(key).is(t, 201, "")
	s.once(t, key)
}

// The answer comes from the attempt that committed.
func testRunRetried(t *testing.T, db Database) {
	s, key, gate, attempts := newShop(db, idempotency.MiddlewareConfig{}), idempotency.NewKey(), db.gate(t), 0
	first := s.behind(t, gate, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		if err := db.Add(ctx, tx, string(key)); err != nil {
			return idempotency.Response{}, err
		}
		if attempts++; attempts < 3 {
			return idempotency.Response{Status: 200, Body: []byte("undone")}, &pgconn.PgError{Code: "40001"}
		}
		return idempotency.Response{Status: 201, Body: []byte("done")}, nil
	}).post(key)
	if first.is(t, 201, ""); first.body != "done" || attempts != 3 {
		t.Errorf("answer %q after %d attempts", first.body, attempts)
	}
	for _, gate := range []driver.Store{gate, db.gate(t)} {
		if again := s.behind(t, gate, s.order(key)).post(key); again.body != "done" || !again.replayed() {
			t.Errorf("again: %+v", again)
		}
	}
	s.once(t, key)
}

// blind cannot read its records.
type blind struct{ pgxdriver.Records }

var errBlind = errors.New("records are down")

func (blind) Lookup(context.Context, driver.Key) (pgxdriver.Record, bool, error) {
	return pgxdriver.Record{}, false, errBlind
}

func (blind) Resolve(context.Context, driver.Key) (pgxdriver.Record, bool, error) {
	return pgxdriver.Record{}, false, errBlind
}

func testRecordsDown(t *testing.T, db Database) {
	key, taken := idempotency.NewKey(), errors.New("seat taken")
	down := db
	down.Records = blind{db.Records}
	s, gate := newShop(down, idempotency.MiddlewareConfig{}), db.gate(t)
	s.behind(t, gate, func(context.Context, pgx.Tx) (idempotency.Response, error) {
		return idempotency.Response{}, taken
	}).post(key)
	if errors.Is(s.err, taken) || !errors.Is(s.err, errBlind) {
		t.Errorf("Do = %v; an unresolved failure must not be returned", s.err)
	}

	down.Transactor = lossy{db.Transactor, true}
	s = newShop(down, idempotency.MiddlewareConfig{})
	s.behind(t, gate, s.order(key)).post(key).is(t, 503, "")
	if _, unknown := errors.AsType[*txretry.CommitUnknownError](s.err); !unknown {
		t.Errorf("Do = %v; want the unknown outcome", s.err)
	}
	s = newShop(db, idempotency.MiddlewareConfig{})
	if again := s.behind(t, gate, s.order(key)).post(key); again.status != 201 || !again.replayed() {
		t.Errorf("again: %+v; want the committed answer", again)
	}
	s.once(t, key)
}

// refused is an error with a status for the client.
type refused struct{ status int }

func (r refused) Error() string   { return fmt.Sprintf("refused with %d", r.status) }
func (refused) Code() string      { return "INVALID_REQUEST" }
func (r refused) HTTPStatus() int { return r.status }

// testStatusDecides answers in both ways of a handler: by a Response and by an error.
func testStatusDecides(t *testing.T, db Database) {
	for name, gate := range map[string]driver.Store{"records alone": nil, "gate": db.gate(t)} {
		store := db.store(t, gate)
		for status, kept := range map[int]bool{
			400: true, 404: true, 409: true, 422: true, 401: false, 408: false, 425: false, 429: false, 499: false, 500: false, 503: false,
		} {
			for _, fails := range []bool{false, true} {
				runs := 0
				handler := store.Handler(func(context.Context, pgx.Tx, *http.Request) (idempotency.Response, error) {
					if runs++; fails {
						return idempotency.Response{}, refused{status}
					}
					return idempotency.Response{Status: status}, nil
				})
				key, service := idempotency.NewKey(), newService(t, store, idempotency.MiddlewareConfig{}, handler.ServeHTTP)
				first, again := service.post(key), service.post(key)
				if first.status != status || again.status != status || again.body != first.body || again.replayed() != kept || runs == 1 != kept {
					t.Errorf("%s, %d by an error %v: %d runs, then %+v; want kept %v", name, status, fails, runs, again, kept)
				}
			}
		}
	}
}

// testErrorIsNoReplay uses a key of another request, with the record in each possible place.
func testErrorIsNoReplay(t *testing.T, db Database) {
	gate := db.gate(t)
	for name, stores := range map[string][2]driver.Store{
		"records alone": {nil, nil}, "gate": {gate, gate}, "a gate that forgot": {gate, db.gate(t)}, "no gate any more": {gate, gone{}},
	} {
		key := idempotency.NewKey()
		fn := func(context.Context, pgx.Tx) (idempotency.Response, error) {
			return idempotency.Response{Status: 201}, nil
		}
		_, _, err := db.store(t, stores[0]).DoKey(t.Context(), key, []string{"one"}, fn)
		must(t, name, err)
		_, replayed, err := db.store(t, stores[1]).DoKey(t.Context(), key, []string{"other"}, fn)
		if !errors.Is(err, idempotency.ErrKeyReused) || replayed {
			t.Errorf("%s: replayed %v, error %v", name, replayed, err)
		}
	}
	// A value of another type than the stored one.
	store, key := db.store(t, nil), idempotency.NewKey()
	for n := range 2 {
		value, replayed, err := idempotency.Do(t.Context(), store, key, nil, func(context.Context) (any, error) { return "text", nil })
		if err != nil || value != "text" || replayed != (n > 0) {
			t.Errorf("call %d: %v, %v, %v", n, value, replayed, err)
		}
	}
	if _, replayed, err := idempotency.Do(t.Context(), store, key, nil, func(context.Context) (int, error) { return 1, nil }); err == nil || replayed {
		t.Errorf("a value that cannot be decoded: replayed %v, error %v", replayed, err)
	}
}
