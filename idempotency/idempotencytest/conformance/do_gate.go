package conformance

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
)

// gone is a gate that cannot be asked.
type gone struct{}

var errGone = errors.New("gate is down")

func (gone) Begin(context.Context, driver.Claim) (driver.BeginResult, error) {
	return driver.BeginResult{}, errGone
}

func (gone) Extend(context.Context, driver.Claim) error { return errGone }

func (gone) Complete(context.Context, driver.Claim, driver.Response) error { return errGone }

func (gone) Release(context.Context, driver.Claim) error { return errGone }

// stampede sends requests of one key at once, until every one has its answer,
// and checks that there is one effect and one answer.
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

// testAlone: Postgres alone keeps the promise.
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

// testGateDown goes from a gate that works to one that does not, and back.
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

// testGateDownRefusal: not every handler gets as far as its transaction.
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
	s.behind(t, db.gate(t), s.order(key)).post(key).is(t, 404, "") // the record stands in the way of an effect
	if n := db.Count(t, string(key)); n != 0 {
		t.Errorf("%d effects, want none", n)
	}
}

// hasty is a gate whose leases are renewed soon.
type hasty struct{ driver.Store }

func (h hasty) Begin(ctx context.Context, c driver.Claim) (driver.BeginResult, error) {
	out, err := h.Store.Begin(ctx, c)
	if out.State == driver.Acquired {
		out.Lease = 300 * time.Millisecond // a third of that before it is renewed
	}
	return out, err
}

func testRunLeaseLost(t *testing.T, db Database) {
	for what, end := range map[string]func(ctx context.Context) error{
		"goes on":     func(context.Context) error { return nil },
		"gives up":    func(ctx context.Context) error { return ctx.Err() },
		"asks for it": context.Cause,
	} {
		s, key, gate := newShop(db, idempotency.MiddlewareConfig{}), idempotency.NewKey(), db.gate(t)
		s.behind(t, hasty{gate}, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			if err := db.Add(ctx, tx, string(key)); err != nil {
				return idempotency.Response{}, err
			}
			claim, _ := driver.ClaimFrom(ctx)
			must(t, "Release", gate.Release(ctx, claim)) // as if the gate had lost it
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

// An fn that fails because some store of its own is down has run: it is not
// the gate that could not be asked.
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
