package ratelimitredis_test

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"log/slog"
	"maps"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/metrictest"
	"github.com/holdfast-go/holdfast/internal/ratelimit/conformance"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/driver"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

const day = 24 * time.Hour

// patient is a timeout for tests that do not measure time.
const patient = testenv.Patience

func open(t *testing.T, client redis.UniversalClient, cfg ratelimitredis.Config) *ratelimitredis.Limiter {
	t.Helper()
	if cfg.Timeout == 0 {
		cfg.Timeout = patient
	}
	l, err := ratelimitredis.New(client, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestConformance(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	conformance.Test(t, func(t *testing.T) conformance.Limiter {
		return open(t, client, ratelimitredis.Config{Prefix: "test:" + rand.Text()})
	}, func(t *testing.T, body func(t *testing.T)) { body(t) })
}

var (
	perUser = ratelimit.Limit{Name: "user", Max: 10}
	global  = ratelimit.Limit{Name: "global", Max: 1000}
	tokens  = ratelimit.Limit{Name: "calls", Max: 100, Algorithm: ratelimit.TokenBucket}
)

// The keys are a public format: other systems read them.
func TestKeysValuesAndTTL(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	l := open(t, client, ratelimitredis.Config{})
	charges := []ratelimit.Charge{{Limit: perUser, Key: "user-42"}, {Limit: global, Cost: 3}, {Limit: tokens, Key: "x:y"}}
	d, err := l.Allow(t.Context(), charges...)
	if err != nil || !d.Allowed {
		t.Fatalf("%+v, %v", d, err)
	}
	minute := strconv.FormatInt(d.At.Unix()/60, 10)
	want := map[string]string{
		"rate_limit:user:user-42:" + minute:                       "1",
		"rate_limit:global:" + minute:                             "3",
		"rate_limit:calls:" + driver.EncodeKey("x:y") + ":b60000": "60000:" + strconv.FormatInt(d.At.UnixMilli(), 10),
	}
	check := func() {
		t.Helper()
		keys, err := client.Keys(t.Context(), "*").Result()
		if err != nil || len(keys) != len(want) {
			t.Errorf("there are the keys %v, %v, want %v", keys, err, want)
		}
		for key, value := range want {
			if got, err := client.Get(t.Context(), key).Result(); err != nil || got != value {
				t.Errorf("%s is %q, %v, want %q", key, got, err, value)
			}
			if ttl, err := client.PTTL(t.Context(), key).Result(); err != nil || ttl <= 0 || ttl > 121*time.Second {
				t.Errorf("%s has the TTL %v, %v", key, ttl, err)
			}
		}
	}
	check()

	part := []ratelimit.Charge{d.Charges()[1]}
	part[0].Cost = 2
	if err := l.Refund(t.Context(), part...); err != nil {
		t.Fatal(err)
	}
	want["rate_limit:global:"+minute] = "1"
	check()
	if err := l.Refund(t.Context(), d.Charges()[0]); err != nil {
		t.Fatal(err)
	}
	delete(want, "rate_limit:user:user-42:"+minute)
	check()
}

// Values of other systems under our names do not break a decision.
func TestForeignValues(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	l := open(t, client, ratelimitredis.Config{})
	now, err := client.Time(t.Context()).Result()
	if err != nil {
		t.Fatal(err)
	}
	set := func(value string) {
		t.Helper()
		for m := now.Unix()/60 - 1; m <= now.Unix()/60+2; m++ {
			if err := client.Set(t.Context(), "rate_limit:user:"+strconv.FormatInt(m, 10), value, time.Minute).Err(); err != nil {
				t.Fatal(err)
			}
		}
		if err := client.Set(t.Context(), "rate_limit:calls:b60000", value, time.Minute).Err(); err != nil {
			t.Fatal(err)
		}
	}
	for _, value := range []string{"", "x", "nan", "-nan", "-5", "-inf", "0x", "1:2:3", ":"} {
		set(value)
		d, err := l.Allow(t.Context(), ratelimit.Charge{Limit: perUser}, ratelimit.Charge{Limit: tokens})
		if err != nil || !d.Allowed || d.Limits()[0].Remaining != 9 || d.Limits()[1].Remaining != 99 {
			t.Errorf("with %q: %+v, %v", value, d, err)
		}
	}
	for _, value := range []string{"1e300", "inf", "9223372036854775807", "99999999999999999999"} {
		set(value)
		if d, err := l.Allow(t.Context(), ratelimit.Charge{Limit: perUser}); err != nil || d.Allowed {
			t.Errorf("with %q: %+v, %v, want a denial", value, d, err)
		}
	}
	set("6000000000:1")
	if d, err := l.Allow(t.Context(), ratelimit.Charge{Limit: tokens}); err != nil || !d.Allowed {
		t.Errorf("with an old bucket: %+v, %v", d, err)
	}
	for _, value := range []string{"99999999999999999999:1", "99999999999999999999:99999999999999", "6000001:99999999999999"} {
		set(value)
		if d, err := l.Allow(t.Context(), ratelimit.Charge{Limit: tokens}); err != nil || d.Allowed || d.RetryAfter <= 0 {
			t.Errorf("with a bucket of %q: %+v, %v, want a denial", value, d, err)
		}
	}
	if err := client.LPush(t.Context(), "rate_limit:list:b60000", "x").Err(); err != nil {
		t.Fatal(err)
	}
	list := ratelimit.Limit{Name: "list", Max: 1, Algorithm: ratelimit.TokenBucket}
	if d, err := l.Allow(t.Context(), ratelimit.Charge{Limit: list}); err != nil || !d.Allowed {
		t.Errorf("with a list: %+v, %v", d, err)
	}
	if err := client.Del(t.Context(), "rate_limit:list:b60000").Err(); err != nil {
		t.Fatal(err)
	}
	if err := client.LPush(t.Context(), "rate_limit:list:b60000", "x").Err(); err != nil {
		t.Fatal(err)
	}
	if err := l.Refund(t.Context(), ratelimit.Charge{Limit: list}); err != nil {
		t.Errorf("a refund with a list: %v", err)
	}
	if err := l.Reset(t.Context(), ratelimit.Charge{Limit: list}); err != nil {
		t.Errorf("a reset with a list: %v", err)
	}
}

// noted counts the script calls of a client.
type noted struct {
	mu    sync.Mutex
	calls int
}

func (n *noted) DialHook(next redis.DialHook) redis.DialHook { return next }
func (n *noted) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if strings.HasPrefix(cmd.Name(), "eval") {
			n.mu.Lock()
			n.calls++
			n.mu.Unlock()
		}
		return next(ctx, cmd)
	}
}

func (n *noted) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		n.mu.Lock()
		n.calls++
		n.mu.Unlock()
		return next(ctx, cmds)
	}
}

func (n *noted) take() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	calls := n.calls
	n.calls = 0
	return calls
}

func TestOneRoundTripWhateverTheNumberOfLimits(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	calls := &noted{}
	client.AddHook(calls)
	l := open(t, client, ratelimitredis.Config{DenyCache: -1})
	c := []ratelimit.Charge{{Limit: perUser, Key: "a"}, {Limit: global}, {Limit: tokens}}
	if _, err := l.Allow(t.Context(), c...); err != nil { // loads the script
		t.Fatal(err)
	}
	calls.take()
	for range 20 {
		if _, err := l.Allow(t.Context(), c...); err != nil {
			t.Fatal(err)
		}
	}
	if n := calls.take(); n != 20 {
		t.Errorf("20 decisions took %d calls", n)
	}
}

func TestNewReportsEveryViolation(t *testing.T) {
	t.Parallel()
	if _, err := ratelimitredis.New(nil, ratelimitredis.Config{}); err == nil {
		t.Error("accepted a nil client")
	}
	client := redis.NewClient(&redis.Options{})
	defer func() {
		if err := client.Close(); err != nil {
			t.Error(err)
		}
	}()
	_, err := ratelimitredis.New(client, ratelimitredis.Config{Prefix: "{x}", Tag: "a}b", Timeout: -1, DenyCache: 3, Replicas: -1})
	for _, want := range []string{"Prefix", "Tag", "Timeout", "DenyCache", "Replicas"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not name %s", err, want)
		}
	}
	if _, err := ratelimitredis.New(client, ratelimitredis.Config{FailOpen: true, Replicas: 2}); err == nil || !strings.Contains(err.Error(), "FailOpen") {
		t.Errorf("with both FailOpen and Replicas: %v", err)
	}
}

func testSchedules(t *testing.T, client redis.UniversalClient) {
	t.Helper()
	l, advance := ratelimitredis.NewWithClock(t, client, ratelimitredis.Config{Prefix: "test:" + rand.Text(), Timeout: patient})
	conformance.TestSchedules(t, l, advance, 300)
}

func TestSchedules(t *testing.T) {
	t.Parallel()
	testSchedules(t, redistest.New(t))
}

func TestClockSetBack(t *testing.T) {
	t.Parallel()
	l, advance := ratelimitredis.NewWithClock(t, redistest.New(t), ratelimitredis.Config{Timeout: patient})
	conformance.TestClockSetBack(t, l, advance)
}

func TestCheck(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	if err := open(t, client, ratelimitredis.Config{}).Check(t.Context()); err != nil {
		t.Error(err)
	}
	if err := open(t, impatient(t, "127.0.0.1:1", 0), ratelimitredis.Config{}).Check(t.Context()); err == nil || hasFix(err) {
		t.Errorf("without a server: %v", err)
	}
}

func TestCheck_findsProblemsOfDecisions(t *testing.T) {
	t.Parallel()
	client := redistest.Client(t, testenv.Private(t, testenv.Redis, redistest.ClusterFlags...).URL()) // the client does not show that the server is in a cluster
	if err := client.ClusterAddSlotsRange(t.Context(), 0, 16383).Err(); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, func() error { return open(t, client, ratelimitredis.Config{Tag: "rl"}).Check(t.Context()) })
	err := open(t, client, ratelimitredis.Config{}).Check(t.Context())
	if fix := findings(t, err, 1)[0].Fix(); !strings.Contains(fix, "Tag") {
		t.Errorf("without a tag on a cluster: %v, Fix returns %q", err, fix)
	}
	if err := client.ACLSetUser(t.Context(), "weak", "on", ">secret", "~*", "+@all", "-evalsha", "-eval").Err(); err != nil {
		t.Fatal(err)
	}
	opts := *client.Options()
	opts.Username, opts.Password = "weak", "secret"
	weak := redis.NewClient(&opts)
	defer func() {
		if err := weak.Close(); err != nil {
			t.Error(err)
		}
	}()
	err = open(t, weak, ratelimitredis.Config{Tag: "rl"}).Check(t.Context())
	if fix := findings(t, err, 1)[0].Fix(); !strings.Contains(fix, "EVALSHA") {
		t.Errorf("a user without permission for scripts: %v, Fix returns %q", err, fix)
	}
	if err := client.ConfigSet(t.Context(), "maxmemory", "100mb").Err(); err != nil {
		t.Fatal(err)
	}
	if err := client.ConfigSet(t.Context(), "maxmemory-policy", "allkeys-lru").Err(); err != nil {
		t.Fatal(err)
	}
	err = open(t, client, ratelimitredis.Config{Tag: "rl"}).Check(t.Context())
	if found := findings(t, err, 1)[0]; !strings.Contains(found.Error(), "allkeys-lru") {
		t.Errorf("with eviction: %v", found)
	}
}

// finding is an error with a fix, unlike a failure to read the server.
type finding interface {
	error
	Fix() string
}

// findings returns the findings of a Check, and fails unless there are count.
func findings(t *testing.T, err error, count int) (found []finding) {
	t.Helper()
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		t.Fatalf("%v is no list of findings", err)
	}
	for _, each := range joined.Unwrap() {
		if f, ok := each.(finding); ok {
			found = append(found, f)
		} else {
			t.Errorf("%v has no Fix", each)
		}
	}
	if len(found) != count {
		t.Fatalf("%d findings, want %d: %v", len(found), count, err)
	}
	return found
}

func hasFix(err error) bool {
	_, ok := errors.AsType[finding](err)
	return ok
}

// A server may reject CONFIG GET; a server that does not answer is reported.
func TestCheckWithoutConfiguration(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	if err := open(t, redistest.Configless(client, redistest.Refusal("NOPERM")), ratelimitredis.Config{}).Check(t.Context()); err != nil {
		t.Errorf("refused: %v", err)
	}
	if err := open(t, redistest.Configless(client, io.ErrUnexpectedEOF), ratelimitredis.Config{}).Check(t.Context()); !errors.Is(err, io.ErrUnexpectedEOF) || hasFix(err) {
		t.Errorf("without an answer: %v", err)
	}
}

// wantRecorded compares everything recorded since the last call; of durations only their number.
func wantRecorded(t *testing.T, r *metrictest.Recorder, when string, durations int, want map[string][]float64) {
	t.Helper()
	const duration = "holdfast.ratelimit.duration"
	recorded := r.Take()
	if n := len(recorded[duration]); n != durations {
		t.Errorf("%s: recorded %d durations, want %d", when, n, durations)
	}
	delete(recorded, duration)
	rounded := func(got, want float64) bool { return math.Round(10*got) == 10*want }
	if !maps.EqualFunc(recorded, want, func(got, want []float64) bool { return slices.EqualFunc(got, want, rounded) }) {
		t.Errorf("%s: recorded %v, want %v", when, recorded, want)
	}
}

// Decisions are counted by outcome, source and the limit with the smallest share left.
func TestMetrics(t *testing.T) {
	t.Parallel()
	proxy := testenv.NewProxy(t, redistest.URL(t))
	meter := &metrictest.Recorder{}
	client := redistest.Client(t, proxy.URL())
	configure := func(failOpen bool) ratelimitredis.Config {
		return ratelimitredis.Config{FailOpen: failOpen, MeterProvider: meter, Logger: slog.New(slog.DiscardHandler)}
	}
	allow, deny := open(t, client, configure(true)), open(t, client, configure(false))
	testenv.Eventually(t, func() error { return client.Ping(t.Context()).Err() })
	charges := []ratelimit.Charge{
		{Limit: ratelimit.Limit{Name: "user", Max: 2, Window: day}, Key: "ann"},
		{Limit: ratelimit.Limit{Name: "global", Max: 10, Window: day}},
	}
	ask := func(l *ratelimitredis.Limiter, charges ...ratelimit.Charge) { _, _ = l.Allow(t.Context(), charges...) }

	const decisions, remaining = "holdfast.ratelimit.decisions", "holdfast.ratelimit.remaining"
	ask(allow, charges...)
	wantRecorded(t, meter, "allowed", 1, map[string][]float64{
		decisions + "{limit=user,outcome=allowed,source=store}": {1}, remaining + "{limit=user}": {0.5},
	})
	ask(allow, charges[1])
	ask(allow, charges...)
	ask(allow, charges...)
	wantRecorded(t, meter, "denied", 3, map[string][]float64{
		decisions + "{limit=global,outcome=allowed,source=store}": {1}, remaining + "{limit=global}": {0.8},
		decisions + "{limit=user,outcome=allowed,source=store}": {1}, decisions + "{limit=user,outcome=denied,source=store}": {1},
		remaining + "{limit=user}": {0, 0},
	})
	ask(allow, charges...)
	wantRecorded(t, meter, "remembered", 0, map[string][]float64{decisions + "{limit=user,outcome=denied,source=cache}": {1}})

	proxy.Cut()
	ask(allow, charges[1])
	wantRecorded(t, meter, "without Redis", 1, map[string][]float64{decisions + "{limit=,outcome=allowed,source=fallback}": {1}})
	ask(deny, charges[1])
	wantRecorded(t, meter, "undecided", 1, map[string][]float64{decisions + "{limit=,outcome=unavailable,source=none}": {1}})
}

// tally counts the decisions about one limit in one millisecond of the server's time.
type tally struct{ allowed, denied int64 }

// tallies holds the tallies of limits, by their name and the millisecond.
type tallies map[string]map[int64]tally

// Limiters of many processes, each with its own client, charge the same limits concurrently. Each decision matches
// the arithmetic for all admitted charges.
func TestManyClients_decideExactly(t *testing.T) {
	t.Parallel()
	url := redistest.URL(t)
	limits := []ratelimit.Limit{
		{Name: "contended", Max: 20, Window: 2 * time.Second},
		{Name: "day", Max: 100, Window: day},
		{Name: "smooth", Max: 20, Window: 2 * time.Second, Algorithm: ratelimit.TokenBucket, Burst: 5},
	}
	all := chargeTogether(t, url, limits)
	for _, limit := range limits {
		checkTally(t, limit, all[limit.Name])
	}
}

// chargeTogether charges the limits through limiters of several clients, and returns their decisions.
func chargeTogether(t *testing.T, url string, limits []ratelimit.Limit) tallies {
	t.Helper()
	clients, each := 4, 80
	if rounds := testenv.Rounds(t); rounds > 0 {
		clients, each = 50, 20*rounds
	}
	const callers = 4
	all := tallies{}
	for _, limit := range limits {
		all[limit.Name] = map[int64]tally{}
	}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for range clients {
		l := open(t, redistest.Client(t, url), ratelimitredis.Config{DenyCache: -1})
		for caller := range callers {
			wg.Go(func() {
				for n := range each {
					limit := limits[(caller+n)%len(limits)]
					d, err := l.Allow(t.Context(), ratelimit.Charge{Limit: limit})
					if err != nil {
						t.Error(err)
						return
					}
					mu.Lock()
					sum := all[limit.Name][d.At.UnixMilli()]
					if d.Allowed {
						sum.allowed++
					} else {
						sum.denied++
					}
					all[limit.Name][d.At.UnixMilli()] = sum
					mu.Unlock()
				}
			})
		}
	}
	wg.Wait()
	return all
}

// checkTally checks the milliseconds in order: the charges admitted up to the end of each must fit, and nothing was
// denied while a unit was free.
func checkTally(t *testing.T, limit ratelimit.Limit, byTime map[int64]tally) {
	t.Helper()
	w := limit.Window.Milliseconds()
	windows := map[int64]int64{}
	missing, since := int64(0), int64(0)
	allowed, denied := int64(0), int64(0)
	for _, at := range slices.Sorted(maps.Keys(byTime)) {
		n := byTime[at]
		allowed, denied = allowed+n.allowed, denied+n.denied
		free := int64(0) // in units times the window
		switch limit.Algorithm {
		case ratelimit.TokenBucket:
			missing = max(0, missing-(at-since)*limit.Max) + n.allowed*w
			since = at
			free = limit.Burst*w - missing
		default:
			windows[at/w] += n.allowed
			free = limit.Max*w - windows[at/w]*w
			if limit.Algorithm == ratelimit.SlidingWindow {
				free -= windows[at/w-1] * (w - at%w)
			}
		}
		if free < 0 {
			t.Fatalf("%s: at %d more was admitted than the limit allows: %d too many", limit.Name, at, -free/w+1)
		}
		if n.denied > 0 && free >= w {
			t.Fatalf("%s: at %d %d were denied although %d were free", limit.Name, at, n.denied, free/w)
		}
	}
	t.Logf("%s: %d admitted, %d denied", limit.Name, allowed, denied)
	if denied == 0 || allowed == 0 {
		t.Errorf("%s: %d admitted, %d denied: too few to prove much", limit.Name, allowed, denied)
	}
}
