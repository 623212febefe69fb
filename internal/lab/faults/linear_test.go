package faults_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
)

// The possible answers for a key: the response, fresh or replayed, or that the key is in use.
const (
	fresh = iota
	replayed
	busy
)

// sight is the answer to one request, with the time of the request.
type sight struct {
	kind      int
	call, end time.Duration
	left      time.Duration // when the handler returned, for a fresh answer
	answer    string
}

// history has the answers to all clients of one key.
type history struct {
	mu    sync.Mutex
	seen  []sight
	start time.Time
}

func (h *history) now() time.Duration { return time.Since(h.start) }

func (h *history) add(s sight) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.seen = append(h.seen, s)
}

// explained checks that the history is linearizable. There must be one moment at which the key was
// acquired, and a later one at which it was completed, so that every answer is true at some moment
// during its request: "in use" between the two, the response after the second. With one fresh
// request it is enough to try the earliest moment for the first (its call), and the latest for the
// second (its end, or the end of the first replay). A general checker needs time exponential in the
// number of clients to find the same two moments.
func (h *history) explained() error {
	var first []sight
	for _, s := range h.seen {
		if s.kind == fresh {
			first = append(first, s)
		}
	}
	if len(first) != 1 {
		return fmt.Errorf("%d requests were carried out", len(first))
	}
	acquired, completed := first[0].call, first[0].end
	for _, s := range h.seen {
		if s.kind == replayed {
			completed = min(completed, s.end)
		}
		if s.kind != busy && s.answer != first[0].answer {
			return fmt.Errorf("answers %s and %s", first[0].answer, s.answer)
		}
	}
	if completed < first[0].left {
		return errors.New("an answer was replayed before it was made")
	}
	for _, s := range h.seen {
		if s.kind == busy && (s.end < acquired || s.call > completed) {
			return fmt.Errorf("in use from %v to %v, though acquired after %v and completed by %v", s.call, s.end, acquired, completed)
		}
	}
	return nil
}

// The checker must reject impossible histories.
func TestHistory_rejectsImpossibleOnes(t *testing.T) {
	t.Parallel()
	run := sight{kind: fresh, call: 10, left: 20, end: 30, answer: "a"}
	for name, tt := range map[string]struct {
		seen []sight
		good bool
	}{
		"alone":                        {[]sight{run}, true},
		"in use, then replayed":        {[]sight{run, {kind: busy, call: 5, end: 15}, {kind: replayed, call: 22, end: 25, answer: "a"}}, true},
		"in use during the replay":     {[]sight{run, {kind: busy, call: 24, end: 40}, {kind: replayed, call: 22, end: 25, answer: "a"}}, true},
		"carried out twice":            {[]sight{run, run}, false},
		"never carried out":            {[]sight{{kind: busy, end: 1}}, false},
		"another answer":               {[]sight{run, {kind: replayed, call: 40, end: 41, answer: "b"}}, false},
		"replayed too early":           {[]sight{run, {kind: replayed, call: 12, end: 15, answer: "a"}}, false},
		"in use before the first":      {[]sight{run, {kind: busy, call: 5, end: 9}}, false},
		"in use after the answer":      {[]sight{run, {kind: busy, call: 31, end: 32}}, false},
		"in use after it was replayed": {[]sight{run, {kind: busy, call: 26, end: 27}, {kind: replayed, call: 22, end: 25, answer: "a"}}, false},
	} {
		if err := (&history{seen: tt.seen}).explained(); (err == nil) != tt.good {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// keys is how many keys are tried, one after the other. No lease ends while its owner lives.
const (
	keys      = 50
	longLease = 30 * time.Second
)

// visit has the times of one run of the handler.
type visit struct{ entered, left time.Time }

type visitKey struct{}

// 32 clients send the same request at once, and repeat it until they have the answer.
func TestIdempotency_isLinearizable(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "sends thousands of requests at once")
	for name, open := range map[string]func(t *testing.T) http.Handler{
		"memory": func(t *testing.T) http.Handler { return plain(t, idempotencytest.NewStore()) },
		"redis": func(t *testing.T) http.Handler {
			store, err := idempotencyredis.New(redistest.New(t), idempotencyredis.Config{})
			must(t, err)
			return plain(t, store)
		},
		"postgres": func(t *testing.T) http.Handler {
			url := pgtest.URL(t)
			migrateService(t, url)
			store, err := serviceStore(pgtest.Pool(t, url, 10), nil, postgresGate, longLease)
			must(t, err)
			return plain(t, store)
		},
		"cluster": func(t *testing.T) http.Handler {
			client, _ := redistest.Cluster(t)
			store, err := idempotencyredis.New(client, idempotencyredis.Config{})
			must(t, err)
			return plain(t, store)
		},
		"two tiers":      func(t *testing.T) http.Handler { return twoTiers(t, redisGate) },
		"postgres alone": func(t *testing.T) http.Handler { return twoTiers(t, noGate) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := open(t)
			for range keys {
				contend(t, h)
			}
		})
	}
}

func plain(t *testing.T, store driver.Store) http.Handler {
	t.Helper()
	return guarded(t, store, func(w http.ResponseWriter, r *http.Request) {
		v := r.Context().Value(visitKey{}).(*visit)
		v.entered = time.Now()
		resp, err := idempotency.JSON(http.StatusCreated, v.entered)
		must(t, err)
		resp.Send(w)
		v.left = time.Now()
	})
}

func guarded(t *testing.T, store driver.Store, fn http.HandlerFunc) http.Handler {
	t.Helper()
	protect, err := idempotency.NewMiddleware(store, idempotency.UnsafeGlobalScope, idempotency.MiddlewareConfig{Logger: quiet})
	must(t, err)
	return protect(fn)
}

func twoTiers(t *testing.T, gate string) http.Handler {
	t.Helper()
	url := pgtest.URL(t)
	migrateService(t, url)
	front, err := idempotencyredis.New(redistest.New(t), idempotencyredis.Config{Lease: longLease})
	must(t, err)
	store, err := serviceStore(pgtest.Pool(t, url, 8), front, gate, longLease)
	must(t, err)
	return guarded(t, store, func(w http.ResponseWriter, r *http.Request) {
		v := r.Context().Value(visitKey{}).(*visit)
		v.entered = time.Now()
		_, err := store.Do(r.Context(), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			if _, err := tx.Exec(ctx, `INSERT INTO effects (key) VALUES ($1)`, r.Header.Get(idempotency.Header)); err != nil {
				return idempotency.Response{}, err
			}
			v.left = time.Now() // with Postgres alone the answer is visible from COMMIT on
			return idempotency.JSON(http.StatusCreated, v.entered)
		})
		if gate != noGate {
			v.left = time.Now() // else it is visible from the gate's copy on
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	})
}

func contend(t *testing.T, h http.Handler) {
	t.Helper()
	const clients = 32
	key, seen := idempotency.NewKey(), &history{start: time.Now()}
	var wg sync.WaitGroup
	for range clients {
		wg.Go(func() {
			for deadline := time.Now().Add(testenv.Patience); time.Now().Before(deadline); {
				if seen.ask(t, h, key) {
					return
				}
			}
			t.Error("no answer")
		})
	}
	wg.Wait()
	if err := seen.explained(); err != nil {
		t.Error(err)
	}
}

// ask sends one request and records the answer. It reports whether that was the final answer.
func (h *history) ask(t *testing.T, handler http.Handler, key idempotency.Key) bool {
	t.Helper()
	v := &visit{}
	r := httptest.NewRequest(http.MethodPost, "/", nil)
	r = r.WithContext(context.WithValue(r.Context(), visitKey{}, v))
	r.Header.Set(idempotency.Header, string(key))
	rec := httptest.NewRecorder()
	s := sight{call: h.now()}
	handler.ServeHTTP(rec, r)
	s.end, s.answer = h.now(), rec.Body.String()
	switch {
	case rec.Code == http.StatusConflict:
		s.kind = busy
	case rec.Code != http.StatusCreated:
		t.Errorf("answer %d %s", rec.Code, rec.Body)
	case rec.Header().Get(idempotency.ReplayedHeader) != "":
		s.kind = replayed
	default:
		s.kind, s.left = fresh, v.left.Sub(h.start)
	}
	h.add(s)
	return s.kind != busy
}
