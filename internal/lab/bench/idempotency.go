package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/url"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/internal/lab/load"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry"
)

func idempotencyWorkload() workload {
	return workload{"idempotency", []part{
		{"memory", benchKeysInMemory},
		{"redis", benchRedisKeys},
		{"alone", benchAlone},
	}}
}

// Names of contenders that goals use.
const (
	bareHandler     = "bare handler"
	oursInMemory    = "holdfast, memory"
	oursOnServer    = "holdfast, store"
	oursOverHTTP    = "holdfast, middleware"
	rawRedisTwo     = "raw redis, SET NX, then SET"
	rawRedisOne     = "raw redis, SET NX GET"
	rawPostgresLook = "raw postgres, SELECT"
	transactionOnly = "transaction alone"
	transactionKey  = "transaction and a key row by hand"
	oursAlone       = "holdfast, no gate"
)

const storedKeys = 1000 // used by replays

// keeper is one way to store keys: once does work without content under the key, or finds that it is done.
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

// sink is a client that discards the answer.
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

// replays sends completed keys.
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

// onStore calls the store without the middleware.
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

// benchKeysInMemory measures the cost of the middleware itself, with a memory store that does not grow.
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
	b.atMost(2.5, spreadOf(extra), "us over the bare handler, first run in memory, 1 client")
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

// benchAlone compares exactly-once without a gate with the business transaction alone, and with a transaction that also
// inserts the key and the answer. It compares a replay with a SELECT.
func benchAlone(ctx context.Context, b *bench) {
	pool := b.postgres(ctx)
	must(pool.Exec(ctx, thingsTable+"CREATE TABLE raw (key text PRIMARY KEY, body bytea, expires_at timestamptz NOT NULL DEFAULT now()); CREATE INDEX ON raw (expires_at)"))
	manager := must(txretry.New(pool, txretry.Config{}))
	store := must(idempotencypgx.New(manager, idempotencypgx.Config{}))
	check(store.Migrate(ctx))
	alone, look := over(transactionOnly, transactionHandler(manager, insertThing)), keeper{rawPostgresLook, rawPostgres(pool)}
	byHand := over(transactionKey, transactionHandler(manager, insertThingAndKey))
	ours := over(oursAlone, behind(store, store.Handler(func(ctx context.Context, tx pgx.Tx, _ *http.Request) (idempotency.Response, error) {
		return created, insertThing(ctx, tx)
	})))
	for _, clients := range []int{8, 50} {
		for _, c := range []struct {
			kind string
			all  []contender // the yardstick first, ours last
		}{
			{"first run", []contender{alone.firstRuns(clients), byHand.firstRuns(clients), ours.firstRuns(clients)}},
			{"replay", []contender{look.replays(clients), ours.replays(clients)}},
		} {
			title := fmt.Sprintf("%s, clients: %d", c.kind, clients)
			r := b.measure(ctx, table{
				title: "idempotency without a gate, " + title, columns: requestColumns,
				contenders: c.all, yardsticks: []string{c.all[0].name},
			})
			b.atLeast(0.75, r.ratio(oursAlone, c.all[0].name), fmt.Sprintf("of %s, no gate, %s", c.all[0].name, title))
		}
	}
}

// recent is a memory store that drops old records, like a store in which records expire as fast as new ones
// come. Otherwise a run would measure the growth of the heap. It forgets too early for replays.
type recent struct {
	driver.Store // nil: nothing extends or releases here
	generation   atomic.Pointer[generation]
	begun        atomic.Int64
}

// generation is a store and the previous store, in which some claims are still held.
type generation struct{ young, old *idempotencytest.Store }

const perGeneration = 10_000

func newRecent() *recent {
	s := &recent{}
	s.generation.Store(&generation{young: idempotencytest.NewStore(), old: idempotencytest.NewStore()})
	return s
}

func (s *recent) Begin(ctx context.Context, claim driver.Claim) (driver.BeginResult, error) {
	g := s.generation.Load()
	out, err := g.young.Begin(ctx, claim)
	if out.State == driver.Acquired && s.begun.Add(1)%perGeneration == 0 {
		s.generation.Store(&generation{young: idempotencytest.NewStore(), old: g.young})
	}
	return out, err
}

func (s *recent) Complete(ctx context.Context, claim driver.Claim, resp driver.Response) error {
	g := s.generation.Load()
	err := g.young.Complete(ctx, claim, resp)
	if errors.Is(err, idempotency.ErrLeaseLost) {
		err = g.old.Complete(ctx, claim, resp)
	}
	return err
}

// recordLife keeps a shared server from filling up.
const recordLife = 2 * time.Minute

func (b *bench) redisKeys(ctx context.Context) (*redis.Client, *idempotencyredis.Store) {
	url := b.server(ctx, testenv.Redis, testenv.RedisVar)
	opts := must(redis.ParseURL(url))
	opts.PoolSize, opts.ContextTimeoutEnabled = 50, true // as the production guide says
	client := redis.NewClient(opts)
	b.atEnd(client.Close)
	store, err := idempotencyredis.New(client, idempotencyredis.Config{Prefix: "bench:idempotency", Retention: recordLife})
	check(err)
	return client, store
}

// benchRedisKeys measures first runs and replays, with 1 client and with 50. It compares a Store (Begin and
// Complete, or Begin of a completed key) with the minimum of commands that store a response under a key: no
// token, no fingerprint, no headers, no lease that ends before the record. The middleware adds a request with a
// body, the fingerprint, and the response that it holds back.
func benchRedisKeys(ctx context.Context, b *bench) {
	client, store := b.redisKeys(ctx)
	ours, whole := keeper{oursOnServer, onStore(store)}, over(oursOverHTTP, behind(store, reply))
	for _, clients := range []int{1, 50} {
		for _, c := range []struct {
			kind string
			goal float64
			raw  keeper
			as   func(k keeper, clients int) contender
		}{
			{"first run", 0.8, keeper{rawRedisTwo, rawRedis(client, false)}, keeper.firstRuns},
			{"replay", 0.75, keeper{rawRedisOne, rawRedis(client, true)}, keeper.replays},
		} {
			title := fmt.Sprintf("%s, clients: %d", c.kind, clients)
			r := b.measure(ctx, table{
				title:      "idempotency on redis, " + title,
				columns:    requestColumns,
				contenders: []contender{c.as(c.raw, clients), c.as(ours, clients), c.as(whole, clients)},
				yardsticks: []string{c.raw.name},
			})
			b.atLeast(c.goal, r.ratio(oursOnServer, c.raw.name), fmt.Sprintf("of %s, %s", c.raw.name, title))
		}
	}
}

const thingsTable = "CREATE TABLE things (id bigserial PRIMARY KEY, body bytea);"

const rawPending = "-"

// rawRedis claims with SET NX. With get the same command returns the stored response.
func rawRedis(client *redis.Client, get bool) func(ctx context.Context, key idempotency.Key) error {
	claim := redis.SetArgs{Mode: "NX", Get: get, TTL: recordLife}
	return func(ctx context.Context, key idempotency.Key) error {
		name := "bench:raw:" + string(key)
		old, err := client.SetArgs(ctx, name, rawPending, claim).Result()
		fresh := err == nil && !get || errors.Is(err, redis.Nil) && get
		if fresh {
			return client.Set(ctx, name, body, recordLife).Err()
		}
		if err == nil && old == rawPending {
			err = errors.New("key is in use")
		}
		return err
	}
}

// rawPostgres looks up the key with a SELECT. It claims a new key with INSERT and stores the response with
// UPDATE.
func rawPostgres(pool *pgxpool.Pool) func(ctx context.Context, key idempotency.Key) error {
	return func(ctx context.Context, key idempotency.Key) error {
		var kept []byte
		err := pool.QueryRow(ctx, "SELECT body FROM raw WHERE key = $1", string(key)).Scan(&kept)
		if !errors.Is(err, pgx.ErrNoRows) {
			return err
		}
		_, err = pool.Exec(ctx, "INSERT INTO raw (key) VALUES ($1) ON CONFLICT DO NOTHING", string(key))
		if err == nil {
			_, err = pool.Exec(ctx, "UPDATE raw SET body = $2 WHERE key = $1", string(key), body)
		}
		return err
	}
}

func insertThing(ctx context.Context, tx pgx.Tx) error {
	_, err := tx.Exec(ctx, "INSERT INTO things (body) VALUES ($1)", body)
	return err
}

// insertThingAndKey also inserts the key and the answer, together with COMMIT.
func insertThingAndKey(ctx context.Context, tx pgx.Tx) error {
	if !txretry.AtCommit(tx, "INSERT INTO raw (key, body) VALUES ($1, $2)", string(idempotency.NewKey()), body) {
		return errors.New("the transaction takes no statement for its end")
	}
	return insertThing(ctx, tx)
}

func transactionHandler(manager *txretry.Manager, work func(context.Context, pgx.Tx) error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := manager.Do(r.Context(), work); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		reply.ServeHTTP(w, r)
	})
}

var created = idempotency.Response{Status: http.StatusCreated, Header: http.Header{"Content-Type": {"application/json"}}, Body: body}
