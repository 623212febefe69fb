package linear_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
	"github.com/holdfast-go/holdfast/txretry"
)

// The calls of a store, and the outcomes of its answers besides unknown.
const (
	begin    = "begin"
	extend   = "extend"
	complete = "complete"
	release  = "release"

	acquired   = "acquired"
	inProgress = "in progress"
	completed  = "completed"
	done       = "done"
	lost       = "lost"
)

type keyCall struct {
	op, token string
	key       driver.Key
}

// keyAnswer has the run that holds a key in progress, or made the answer of a completed one. HTTP does not show the
// holder: it is "".
type keyAnswer struct{ outcome, run string }

// keyState is the state of one key: free, held by a run, or completed by it.
type keyState struct {
	run       string
	completed bool
}

// after returns the state after a call, and its answer. No lease ends.
func (s keyState) after(c keyCall) (keyState, keyAnswer) {
	holds := s.run == c.token && !s.completed
	switch {
	case c.op == begin && s.completed:
		return s, keyAnswer{completed, s.run}
	case c.op == begin && (s.run == "" || holds):
		return keyState{run: c.token}, keyAnswer{acquired, ""}
	case c.op == begin:
		return s, keyAnswer{inProgress, s.run}
	case c.op == complete && s.run == c.token:
		return keyState{c.token, true}, keyAnswer{done, ""}
	case c.op == release && holds:
		return keyState{}, keyAnswer{done, ""}
	case c.op == extend && holds:
		return s, keyAnswer{done, ""}
	}
	return s, keyAnswer{lost, ""}
}

// keyModel describes a store of keys. The keys are independent.
var keyModel = porcupine.NondeterministicModel{
	Init: func() []any { return []any{keyState{}} },
	Step: func(state, input, output any) []any {
		before, got := state.(keyState), output.(keyAnswer)
		after, want := before.after(input.(keyCall))
		switch {
		case got.outcome == unknown:
			return []any{before, after}
		case got == want, got == keyAnswer{inProgress, ""} && want.outcome == inProgress:
			return []any{after}
		}
		return nil
	},
	Partition: func(all []porcupine.Operation) (parts [][]porcupine.Operation) {
		at := map[driver.Key]int{}
		for _, op := range all {
			key := op.Input.(keyCall).key
			i, known := at[key]
			if !known {
				i = len(parts)
				at[key], parts = i, append(parts, nil)
			}
			parts[i] = append(parts[i], op)
		}
		return parts
	},
}

// lease is longer than any test: no lease ends.
const lease = 10 * time.Minute

var quiet = slog.New(slog.DiscardHandler)

func inMemory(*testing.T) driver.Store { return idempotencytest.NewStore() }

func onRedis(t *testing.T) driver.Store {
	store, err := idempotencyredis.New(redistest.New(t), idempotencyredis.Config{Lease: lease})
	must(t, err)
	return store
}

func onRedisCluster(t *testing.T) driver.Store {
	client, _ := redistest.Cluster(t)
	store, err := idempotencyredis.New(client, idempotencyredis.Config{Lease: lease})
	must(t, err)
	return store
}

func onPostgres(t *testing.T) driver.Store {
	return records(t, pgtest.New(t), idempotencypgx.Config{Lease: lease})
}

func records(t *testing.T, pool *pgxpool.Pool, cfg idempotencypgx.Config) *idempotencypgx.Store {
	t.Helper()
	manager, err := txretry.New(pool, txretry.Config{Logger: quiet})
	must(t, err)
	store, err := idempotencypgx.New(manager, cfg)
	must(t, err)
	must(t, store.Migrate(t.Context()))
	return store
}

// contenders is the number of clients that use one key of a store at the same time.
const contenders = 4

// compete lets clients make random calls about one key, with their present claims and those of earlier runs. Some
// calls are cut.
func compete(ctx context.Context, store driver.Store, seed uint64, h *history) {
	key := idempotency.NewKey()
	clients(contenders, seed, func(id int, rng *rand.Rand) {
		var claims []driver.Claim
		for n := range 10 {
			op := begin
			if n > 0 {
				op = []string{begin, begin, begin, extend, release, release, release, complete}[rng.IntN(8)]
			}
			if op == begin && rng.IntN(4) > 0 || n == 0 {
				token := fmt.Sprintf("%d-%d", id, n)
				claims = append(claims, driver.Claim{Key: driver.Key(key), Token: token, Fingerprint: driver.FingerprintOf(token)})
			}
			claim := claims[max(0, len(claims)-1-rng.IntN(2))]
			ctx, cancel := cutNow(ctx, rng)
			from := now()
			answer := call(ctx, store, op, claim)
			h.add(keyCall{op, claim.Token, claim.Key}, from, answer, now(), answer.outcome)
			cancel()
		}
	})
}

// call makes one call. Responses and fingerprints show the run that they belong to.
func call(ctx context.Context, store driver.Store, op string, claim driver.Claim) keyAnswer {
	var err error
	switch op {
	case begin:
		var result driver.BeginResult
		if result, err = store.Begin(ctx, claim); err != nil {
			break
		}
		switch result.State {
		case driver.InProgress:
			return keyAnswer{inProgress, holder(result)}
		case driver.Completed:
			if run := string(result.Response.Body); run == holder(result) {
				return keyAnswer{completed, run}
			}
			return keyAnswer{completed, "a response with the fingerprint of another run"}
		}
		return keyAnswer{acquired, ""}
	case extend:
		err = store.Extend(ctx, claim)
	case complete:
		err = store.Complete(ctx, claim, driver.Response{Status: http.StatusOK, Body: []byte(claim.Token)})
	case release:
		err = store.Release(ctx, claim)
	}
	switch {
	case err == nil:
		return keyAnswer{done, ""}
	case errors.Is(err, driver.ErrLeaseLost):
		return keyAnswer{lost, ""}
	case ctx.Err() != nil:
		return keyAnswer{unknown, ""}
	}
	return keyAnswer{err.Error(), ""} // no answer of the model
}

// holder returns the token of a fingerprint that compete made.
func holder(r driver.BeginResult) string {
	for id := range contenders {
		for n := range 10 {
			if token := fmt.Sprintf("%d-%d", id, n); driver.FingerprintOf(token) == r.Fingerprint {
				return token
			}
		}
	}
	return "nobody"
}

// Whatever clients do with a key at the same time, the store answers as if the calls were made one after another.
func TestKeys_storesAreLinearizable(t *testing.T) {
	t.Parallel()
	for name, open := range map[string]func(t *testing.T) driver.Store{"memory": inMemory, "redis": onRedis, "postgres": onPostgres} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			store, h := open(t), &history{}
			for seed := range uint64(testenv.Sequences(t, 30)) {
				compete(t.Context(), store, seed, h)
			}
			if err := h.check(keyModel); err != nil {
				t.Error(err)
			}
			t.Log(h.seen)
			for _, outcome := range []string{acquired, inProgress, completed, done, lost, unknown} {
				if h.seen[outcome] == 0 && (outcome != unknown || name != "memory") { // memory answers before a cut
					t.Errorf("no call had the outcome %s: %v", outcome, h.seen)
				}
			}
		})
	}
}

// Stores with a fault, each of which the check must find.
type (
	// takesHeld acquires a key that another run holds.
	takesHeld struct{ driver.Store }
	// losesResponses answers before it has stored a response, and then does not store it.
	losesResponses struct{ driver.Store }
	// answersOwn answers a completed key with the response of the caller.
	answersOwn struct{ driver.Store }
	// freesForeign does not check the token of a release.
	freesForeign struct {
		driver.Store
		mu      *sync.Mutex
		holders map[driver.Key]driver.Claim
	}
	// looksFirst reads the state of a key in one step and claims it in another one.
	looksFirst struct{ *idempotencytest.Store }
	// readsOld answers from a replica, which has the first answer of each key only.
	readsOld struct {
		driver.Store
		first *sync.Map
	}
)

func (s takesHeld) Begin(ctx context.Context, c driver.Claim) (driver.BeginResult, error) {
	r, err := s.Store.Begin(ctx, c)
	if r.State == driver.InProgress {
		r.State = driver.Acquired
	}
	return r, err
}

func (s losesResponses) Complete(ctx context.Context, c driver.Claim, _ driver.Response) error {
	return s.Extend(ctx, c)
}

func (s answersOwn) Begin(ctx context.Context, c driver.Claim) (driver.BeginResult, error) {
	r, err := s.Store.Begin(ctx, c)
	r.Response.Body, r.Fingerprint = []byte(c.Token), c.Fingerprint
	return r, err
}

func (s freesForeign) Begin(ctx context.Context, c driver.Claim) (driver.BeginResult, error) {
	r, err := s.Store.Begin(ctx, c)
	if r.State == driver.Acquired {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.holders[c.Key] = c
	}
	return r, err
}

func (s freesForeign) Release(ctx context.Context, c driver.Claim) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.Store.Release(ctx, s.holders[c.Key])
}

func (s looksFirst) Begin(ctx context.Context, c driver.Claim) (driver.BeginResult, error) {
	if known, err := s.Look(ctx, c.Key); err != nil || known.State != 0 {
		return driver.BeginResult{State: known.State, Fingerprint: known.Fingerprint, Response: known.Response}, err
	}
	time.Sleep(time.Millisecond)
	_, err := s.Store.Begin(ctx, c)
	return driver.BeginResult{State: driver.Acquired}, err
}

func (s readsOld) Begin(ctx context.Context, c driver.Claim) (driver.BeginResult, error) {
	r, err := s.Store.Begin(ctx, c)
	if err != nil || r.State == driver.Acquired {
		return r, err
	}
	first, _ := s.first.LoadOrStore(c.Key, r)
	return first.(driver.BeginResult), nil
}

func TestKeys_faultyStoresAreNot(t *testing.T) {
	t.Parallel()
	for name, faulty := range map[string]func(*idempotencytest.Store) driver.Store{
		"takes a held key":            func(s *idempotencytest.Store) driver.Store { return takesHeld{s} },
		"loses responses":             func(s *idempotencytest.Store) driver.Store { return losesResponses{s} },
		"answers with another answer": func(s *idempotencytest.Store) driver.Store { return answersOwn{s} },
		"frees with any token": func(s *idempotencytest.Store) driver.Store {
			return freesForeign{s, &sync.Mutex{}, map[driver.Key]driver.Claim{}}
		},
		"looks, then claims": func(s *idempotencytest.Store) driver.Store { return looksFirst{s} },
		"reads old states":   func(s *idempotencytest.Store) driver.Store { return readsOld{s, &sync.Map{}} },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			store, h := faulty(idempotencytest.NewStore()), &history{}
			for seed := range uint64(30) {
				compete(t.Context(), store, seed, h)
			}
			if h.check(keyModel) == nil {
				t.Errorf("the fault was not found in %v", h.seen)
			}
		})
	}
}

// visit has the times of one run of a handler.
type visit struct{ entered, left int64 }

type visitKey struct{}

// carriedOut adds a request that was carried out. It acquires the key before its handler is called, and completes it
// after the handler has returned.
func (h *history) carriedOut(key driver.Key, from int64, v visit, to int64, answer string) {
	h.add(keyCall{begin, answer, key}, from, keyAnswer{acquired, ""}, v.entered, acquired)
	h.add(keyCall{complete, answer, key}, v.left, keyAnswer{done, ""}, to, done)
}

// answered adds a request that was not carried out: its answer is a replay, or that the key is in use.
func (h *history) answered(key driver.Key, from int64, outcome, answer string, to int64) {
	h.add(keyCall{begin, "a later request", key}, from, keyAnswer{outcome, answer}, to, outcome)
}

// The check must reject impossible histories of requests.
func TestRequests_impossibleHistories(t *testing.T) {
	t.Parallel()
	run := func(h *history) { h.carriedOut("k", 10, visit{12, 20}, 30, "a") }
	again := func(h *history) { h.carriedOut("k", 10, visit{12, 20}, 30, "b") }
	busy := func(from, to int64) func(*history) {
		return func(h *history) { h.answered("k", from, inProgress, "", to) }
	}
	replay := func(from, to int64, answer string) func(*history) {
		return func(h *history) { h.answered("k", from, completed, answer, to) }
	}
	for name, tt := range map[string]struct {
		calls []func(*history)
		good  bool
	}{
		"alone":                        {[]func(*history){run}, true},
		"in use, then replayed":        {[]func(*history){run, busy(5, 15), replay(22, 25, "a")}, true},
		"in use during the replay":     {[]func(*history){run, busy(24, 40), replay(22, 25, "a")}, true},
		"carried out twice":            {[]func(*history){run, again}, false},
		"never carried out":            {[]func(*history){busy(0, 1)}, false},
		"another answer":               {[]func(*history){run, replay(40, 41, "b")}, false},
		"replayed too early":           {[]func(*history){run, replay(12, 15, "a")}, false},
		"in use before the first":      {[]func(*history){run, busy(5, 9)}, false},
		"in use after the answer":      {[]func(*history){run, busy(31, 32)}, false},
		"in use after it was replayed": {[]func(*history){run, busy(26, 27), replay(22, 25, "a")}, false},
	} {
		h := &history{}
		for _, add := range tt.calls {
			add(h)
		}
		if err := h.check(keyModel); (err == nil) != tt.good {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Clients send the same request at once, and repeat it until they have the answer.
func TestRequests_areLinearizable(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "sends many requests at once")
	const keys, clientsEach = 50, 8 // the time of the check is exponential in the clients
	for name, open := range map[string]func(t *testing.T) http.Handler{
		"memory":         func(t *testing.T) http.Handler { return plain(t, inMemory(t)) },
		"redis":          func(t *testing.T) http.Handler { return plain(t, onRedis(t)) },
		"postgres":       func(t *testing.T) http.Handler { return plain(t, onPostgres(t)) },
		"cluster":        func(t *testing.T) http.Handler { return plain(t, onRedisCluster(t)) },
		"two tiers":      func(t *testing.T) http.Handler { return inTransactions(t, onRedis(t)) },
		"postgres alone": func(t *testing.T) http.Handler { return inTransactions(t, nil) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			handler, h := open(t), &history{}
			for seed := range uint64(keys) {
				key := idempotency.NewKey()
				clients(clientsEach, seed, func(int, *rand.Rand) {
					for deadline := time.Now().Add(testenv.Patience); !h.ask(t, handler, key); {
						if time.Now().After(deadline) {
							t.Error("no answer")
							return
						}
					}
				})
			}
			if err := h.check(keyModel); err != nil {
				t.Error(err)
			}
			t.Log(h.seen)
			if h.seen[done] != keys || h.seen[completed] != keys*(clientsEach-1) {
				t.Errorf("outcomes: %v", h.seen)
			}
		})
	}
}

func plain(t *testing.T, store driver.Store) http.Handler {
	t.Helper()
	return guarded(t, store, func(w http.ResponseWriter, r *http.Request) {
		v := r.Context().Value(visitKey{}).(*visit)
		v.entered = now()
		resp, err := idempotency.JSON(http.StatusCreated, v.entered)
		must(t, err)
		resp.Send(w)
		v.left = now()
	})
}

func guarded(t *testing.T, store driver.Store, fn http.HandlerFunc) http.Handler {
	t.Helper()
	protect, err := idempotency.NewMiddleware(store, idempotency.UnsafeGlobalScope, idempotency.MiddlewareConfig{Logger: quiet})
	must(t, err)
	return protect(fn)
}

// inTransactions returns a service whose records commit with their effects. The gate may be nil.
func inTransactions(t *testing.T, gate driver.Store) http.Handler {
	t.Helper()
	pool := pgtest.New(t)
	_, err := pool.Exec(t.Context(), `CREATE TABLE effects (id bigserial PRIMARY KEY, key text NOT NULL)`)
	must(t, err)
	store := records(t, pool, idempotencypgx.Config{Gate: gate})
	return guarded(t, store, func(w http.ResponseWriter, r *http.Request) {
		v := r.Context().Value(visitKey{}).(*visit)
		v.entered = now()
		_, err := store.Do(r.Context(), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			if _, err := tx.Exec(ctx, `INSERT INTO effects (key) VALUES ($1)`, r.Header.Get(idempotency.Header)); err != nil {
				return idempotency.Response{}, err
			}
			v.left = now() // with Postgres alone the answer is visible from COMMIT on
			return idempotency.JSON(http.StatusCreated, v.entered)
		})
		if gate != nil {
			v.left = now() // else it is visible from the gate's copy on
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	})
}

// ask sends one request and records the answer. It reports whether that was the final answer.
func (h *history) ask(t *testing.T, handler http.Handler, key idempotency.Key) bool {
	t.Helper()
	v := &visit{}
	r := httptest.NewRequest(http.MethodPost, "/", nil)
	r = r.WithContext(context.WithValue(r.Context(), visitKey{}, v))
	r.Header.Set(idempotency.Header, string(key))
	rec := httptest.NewRecorder()
	from := now()
	handler.ServeHTTP(rec, r)
	to, answer := now(), strings.TrimSpace(rec.Body.String())
	switch {
	case rec.Code == http.StatusConflict:
		h.answered(driver.Key(key), from, inProgress, "", to)
		return false
	case rec.Code != http.StatusCreated:
		t.Errorf("answer %d %s", rec.Code, rec.Body)
	case rec.Header().Get(idempotency.ReplayedHeader) != "":
		h.answered(driver.Key(key), from, completed, answer, to)
	default:
		h.carriedOut(driver.Key(key), from, *v, to, answer)
	}
	return true
}
