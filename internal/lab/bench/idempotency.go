package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/url"
	"time"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/internal/lab/load"
)

func idempotencyWorkload() workload {
	return workload{"idempotency", []part{
		{"memory", benchKeysInMemory},
		{"redis", benchRedisKeys},
		{"alone", benchAlone},
	}}
}

// Names of contenders that goals refer to.
const (
	bareHandler     = "bare handler"
	oursInMemory    = "holdfast, memory"
	oursOnServer    = "holdfast, store"
	oursOverHTTP    = "holdfast, middleware"
	rawRedisTwo     = "raw redis, SET NX, then SET"
	rawRedisOne     = "raw redis, SET NX GET"
	rawPostgresLook = "raw postgres, SELECT"
	transactionOnly = "transaction alone"
	oursAlone       = "holdfast, no gate"
)

const storedKeys = 1000 // that replays ask for

// keeper is some way of keeping keys: once does work without any content under
// the key, or finds that it is done.
type keeper struct {
	name string
	once func(ctx context.Context, key idempotency.Key) error
}

// over sends the key as a request to h.
func over(name string, h http.Handler) keeper {
	return keeper{name, func(ctx context.Context, key idempotency.Key) error { return send(ctx, h, key) }}
}

// reply is a handler without work.
var reply http.Handler = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusCreated)
	_, _ = w.Write(body)
})

func behind(store driver.Store, next http.Handler) http.Handler {
	protect := must(idempotency.NewMiddleware(store, idempotency.UnsafeGlobalScope, idempotency.MiddlewareConfig{
		Logger: slog.New(slog.DiscardHandler),
	}))
	return protect(next)
}

// sink is a client that throws the answer away.
type sink struct {
	header http.Header
	status int
}

func (s *sink) Header() http.Header         { return s.header }
func (s *sink) WriteHeader(status int)      { s.status = status }
func (s *sink) Write(p []byte) (int, error) { return len(p), nil }

var target = &url.URL{Path: "/things"}

func send(ctx context.Context, h http.Handler, key idempotency.Key) error {
	r := (&http.Request{
		Method: http.MethodPost, URL: target, RequestURI: "/things", ContentLength: int64(len(body)),
		Body: io.NopCloser(bytes.NewReader(body)),
		Header: http.Header{
			"Content-Type": {"application/json"}, idempotency.Header: {string(key)},
		},
	}).WithContext(ctx)
	w := &sink{header: http.Header{}}
	h.ServeHTTP(w, r)
	if w.status != http.StatusCreated {
		return fmt.Errorf("answer %d", w.status)
	}
	return nil
}

// firstRuns sends a new key each time.
func (k keeper) firstRuns(clients int) contender {
	return contender{k.name, func(ctx context.Context, length time.Duration) sample {
		return k.drive(ctx, clients, length, idempotency.NewKey)
	}}
}

// replays sends keys that are completed.
func (k keeper) replays(clients int) contender {
	return contender{k.name, func(ctx context.Context, length time.Duration) sample {
		stored := make([]idempotency.Key, storedKeys)
		for i := range stored {
			stored[i] = idempotency.NewKey()
			check(k.once(ctx, stored[i]))
		}
		return k.drive(ctx, clients, length, func() idempotency.Key { return stored[rand.IntN(storedKeys)] })
	}}
}

func (k keeper) drive(ctx context.Context, clients int, length time.Duration, key func() idempotency.Key) sample {
	before := load.CPUTime()
	l, err := load.Drive(ctx, clients, length, func(ctx context.Context, _ int) error { return k.once(ctx, key()) })
	check(err)
	return sample{l.Rate, (load.CPUTime() - before).Seconds() * 1e6 / float64(l.Done)}
}

var requestColumns = []string{"requests/s", "client us/request"}

// onStore asks the store without the middleware.
func onStore(store driver.Store) func(ctx context.Context, key idempotency.Key) error {
	fp := driver.FingerprintOf("things")
	resp := driver.Response{
		Status: http.StatusCreated, Header: http.Header{"Content-Type": {"application/json"}}, Body: body,
	}
	return func(ctx context.Context, key idempotency.Key) error {
		claim := driver.NewClaim(driver.Key(key), fp)
		switch out, err := store.Begin(ctx, claim); {
		case err != nil:
			return err
		case out.State == driver.Acquired:
			return store.Complete(ctx, claim, resp)
		case out.State == driver.Completed && len(out.Response.Body) == len(body):
			return nil
		default:
			return fmt.Errorf("key in state %d", out.State)
		}
	}
}

// benchKeysInMemory tells what the middleware itself costs, and a store in
// memory that does not grow.
func benchKeysInMemory(ctx context.Context, b *bench) {
	handler, keepsAll := behind(newRecent(), reply), behind(idempotencytest.NewStore(), reply)
	bare, ours, again := over(bareHandler, reply), over(oursInMemory, handler), over("holdfast, memory, replay", keepsAll)
	r := b.measure(ctx, table{
		title:      "idempotency in memory, clients: 1",
		columns:    []string{"requests/s", "client us/request"},
		contenders: []contender{bare.firstRuns(1), ours.firstRuns(1), again.replays(1)},
		yardsticks: []string{bareHandler},
	})
	var extra []float64
	for round, s := range r.runs[oursInMemory] {
		extra = append(extra, 1e6/s[0]-1e6/r.runs[bareHandler][round][0])
	}
	b.atMost(2, spreadOf(extra), "us over the bare handler, first run in memory, 1 client")
	b.countRequestAllocations(ctx, keepsAll)
}

func (b *bench) countRequestAllocations(ctx context.Context, handler http.Handler) {
	const calls = 2000
	keys := make([]idempotency.Key, 2*calls)
	for i := range keys {
		keys[i] = idempotency.NewKey()
	}
	var counts [2]float64
	for i, h := range []http.Handler{reply, handler} {
		n := 0
		counts[i] = must(allocations(calls, func() error { n++; return send(ctx, h, keys[n-1]) }))
	}
	b.atMost(8, exactly(counts[1]-counts[0]), "allocations over the bare handler, first run in memory, the growth of the store included")
}
