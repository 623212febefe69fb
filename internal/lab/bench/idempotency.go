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
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
)

func idempotencyWorkload() workload {
	return workload{"idempotency", []part{
		{"memory", benchKeysInMemory},
		{"redis", benchRedisKeys},
		{"postgres", benchPostgresKeys},
		{"tiers", benchTiers},
	}}
}

// Names of contenders that goals refer to.
const (
	bareHandler     = "bare handler"
	oursInMemory    = "holdfast, memory"
	oursOnRedis     = "holdfast, redis"
	oursOnPostgres  = "holdfast, postgres"
	rawRedisTwo     = "raw redis, SET NX, then SET"
	rawRedisOne     = "raw redis, SET NX GET"
	rawPostgresTwo  = "raw postgres, INSERT .. DO NOTHING, then UPDATE"
	rawPostgresLook = "raw postgres, SELECT"
	transactionOnly = "transaction alone"
	oursTwoTiers    = "holdfast, two tiers"
)

const storedKeys = 1000 // that replays ask for

// protected is a handler behind some way of keeping keys.
type protected struct {
	name    string
	handler http.Handler
}

// reply is a handler without work.
var reply http.Handler = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusCreated)
	_, _ = w.Write(body)
})

func behind(store idempotency.Store, next http.Handler) (http.Handler, error) {
	protect, err := idempotency.NewMiddleware(store, idempotency.MiddlewareConfig{
		Scope: idempotency.GlobalScope, Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return nil, err
	}
	return protect(next), nil
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
func (p protected) firstRuns(clients int) contender {
	return contender{p.name, func(ctx context.Context, length time.Duration) (sample, error) {
		return p.drive(ctx, clients, length, idempotency.NewKey)
	}}
}

// replays sends keys that are completed.
func (p protected) replays(clients int) contender {
	return contender{p.name, func(ctx context.Context, length time.Duration) (sample, error) {
		stored := make([]idempotency.Key, storedKeys)
		for i := range stored {
			stored[i] = idempotency.NewKey()
			if err := send(ctx, p.handler, stored[i]); err != nil {
				return nil, err
			}
		}
		return p.drive(ctx, clients, length, func() idempotency.Key { return stored[rand.IntN(storedKeys)] })
	}}
}

func (p protected) drive(ctx context.Context, clients int, length time.Duration, key func() idempotency.Key) (sample, error) {
	before := cpuTime()
	l, err := drive(ctx, clients, length, func(ctx context.Context, _ int) error { return send(ctx, p.handler, key()) })
	return sample{l.rate, (cpuTime() - before).Seconds() * 1e6 / float64(l.done)}, err
}

var requestColumns = []column{{name: "requests/s"}, {name: "client us/request", decimals: 1}}

// share measures first runs and replays on a server, with 1 client and with 50, each beside one
// raw way, and notes the goals.
func (b *bench) share(ctx context.Context, server string, firstRaw, replayRaw, ours protected, first, replay map[int]float64) error {
	for _, clients := range []int{1, 50} {
		r, err := b.measure(ctx, table{
			title:      fmt.Sprintf("idempotency on %s, first run, clients: %d", server, clients),
			columns:    requestColumns,
			contenders: []contender{firstRaw.firstRuns(clients), ours.firstRuns(clients)},
			yardsticks: []string{firstRaw.name},
		})
		if err != nil {
			return err
		}
		if bound, ok := first[clients]; ok {
			b.atLeast(bound, r.ratio(ours.name, firstRaw.name), fmt.Sprintf("of %s, first run, clients: %d", firstRaw.name, clients))
		}
		r, err = b.measure(ctx, table{
			title:      fmt.Sprintf("idempotency on %s, replay, clients: %d", server, clients),
			columns:    requestColumns,
			contenders: []contender{replayRaw.replays(clients), ours.replays(clients)},
			yardsticks: []string{replayRaw.name},
		})
		if err != nil {
			return err
		}
		if bound, ok := replay[clients]; ok {
			b.atLeast(bound, r.ratio(ours.name, replayRaw.name), fmt.Sprintf("of %s, replay, clients: %d", replayRaw.name, clients))
		}
	}
	return nil
}

// benchKeysInMemory tells what the middleware itself costs.
func benchKeysInMemory(ctx context.Context, b *bench) error {
	handler, err := behind(idempotencytest.NewStore(), reply)
	if err != nil {
		return err
	}
	bare, ours := protected{bareHandler, reply}, protected{oursInMemory, handler}
	for _, clients := range []int{1, 50} {
		r, err := b.measure(ctx, table{
			title:   fmt.Sprintf("idempotency in memory, clients: %d", clients),
			columns: []column{{name: "requests/s"}, {name: "client us/request", decimals: 2}},
			contenders: []contender{
				bare.firstRuns(clients), ours.firstRuns(clients), {"holdfast, memory, replay", ours.replays(clients).run},
			},
			yardsticks: []string{bareHandler},
		})
		if err != nil {
			return err
		}
		if clients == 1 {
			var over []float64
			for round, s := range r.runs[oursInMemory] {
				over = append(over, 1e6/s[0]-1e6/r.runs[bareHandler][round][0])
			}
			b.atMost(1.5, spreadOf(over), "us over the bare handler, first run in memory, 1 client")
		}
	}
	return b.countRequestAllocations(ctx, handler)
}

func (b *bench) countRequestAllocations(ctx context.Context, handler http.Handler) error {
	const calls = 2000
	keys := make([]idempotency.Key, 2*calls)
	for i := range keys {
		keys[i] = idempotency.NewKey()
	}
	var counts [2]float64
	for i, h := range []http.Handler{reply, handler} {
		n := 0
		var err error
		counts[i], err = allocations(calls, func() error { n++; return send(ctx, h, keys[n-1]) })
		if err != nil {
			return err
		}
	}
	b.atMost(12, exactly(counts[1]-counts[0]), "allocations over the bare handler, first run in memory, the growth of the store included")
	return nil
}
