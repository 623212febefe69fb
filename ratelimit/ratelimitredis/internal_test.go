package ratelimitredis

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/breaker"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/driver"
)

// Start is the start time of the clock of NewWithClock, and of a synctest bubble.
var Start = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

// NewWithClock returns a limiter whose scripts read the time from a key, and a function that moves it. The limiter's
// own clock does not move, as on a machine with a wrong clock.
func NewWithClock(t *testing.T, client redis.UniversalClient, cfg Config) (*Limiter, func(t *testing.T, d time.Duration)) {
	t.Helper()
	cfg.DenyCache = -1 // it assumes that both clocks have the same speed
	l, err := New(client, cfg)
	if err != nil {
		t.Fatal(err)
	}
	key := l.base + "clock"
	for _, s := range []**script{&l.decideScript, &l.refundScript, &l.resetScript} {
		source := strings.Replace((*s).source, "call('TIME')", "{call('GET', '"+key+"') / 1000, 0}", 1)
		if source == (*s).source {
			t.Fatal("the script reads the time in another way")
		}
		*s = &script{source, redis.NewScript(source).Hash()}
	}
	now := Start
	advance := func(t *testing.T, d time.Duration) {
		t.Helper()
		now = now.Add(d)
		if err := client.Set(context.WithoutCancel(t.Context()), key, now.UnixMilli(), time.Hour).Err(); err != nil {
			t.Fatal(err)
		}
	}
	advance(t, 0)
	return l, advance
}

// OnePipeline allows only one pipeline at a time. Call it before the first call.
func (l *Limiter) OnePipeline() *Limiter {
	l.lanes.Most = 1
	return l
}

// Probing sets the time between probes of a Redis that has failed. Call it before the first call.
func (l *Limiter) Probing(every time.Duration) *Limiter {
	l.breaker = breaker.New(failuresInARow, every)
	return l
}

// Load returns the number of running pipelines and of waiting calls.
func (l *Limiter) Load() (pipelines, waiting int) { return l.lanes.Load() }

// Even if the client's estimate of the server's clock is wrong, the charge counts in the server's window, and the
// client corrects its estimate.
func TestDrift(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	l, err := New(client, Config{Timeout: 10 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	charges := []ratelimit.Charge{
		{Limit: ratelimit.Limit{Name: "minute", Max: 100}},
		{Limit: ratelimit.Limit{Name: "second", Max: 100, Window: time.Second}},
	}
	hour := time.Hour.Milliseconds()
	for n, offset := range []int64{0, 1000, -1000, 60_000, -60_000, hour, -hour, 1000 * hour, -1000 * hour} {
		l.sender.offset.Store(offset)
		d, err := l.Allow(t.Context(), charges...)
		if err != nil || !d.Allowed {
			t.Fatalf("offset %d ms: %+v, %v", offset, d, err)
		}
		if learned := l.sender.offset.Load(); learned < -1000 || learned > 1000 {
			t.Errorf("offset %d ms: corrected to %d", offset, learned)
		}
		l.sender.offset.Store(offset)
		if err := l.Refund(t.Context(), d.Charges()...); err != nil {
			t.Errorf("offset %d ms: refund: %v", offset, err)
		}
		if d.Limits()[0].Remaining != 99 {
			t.Errorf("decision %d left %d, want 99: all in one window, each refunded", n, d.Limits()[0].Remaining)
		}
	}
}

// Nodes of a cluster may have different clocks. A call keeps its own offset even if another call stores the offset of
// another node in the meantime.
func TestDriftOfSeveralClocks(t *testing.T) {
	t.Parallel()
	l, err := New(redistest.New(t), Config{Timeout: 10 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	l.sender.drifted = func(context.Context) { l.sender.offset.Store(time.Hour.Milliseconds()) }
	l.sender.offset.Store(time.Hour.Milliseconds())
	d, err := l.Allow(t.Context(), ratelimit.Charge{Limit: ratelimit.Limit{Name: "minute", Max: 100}})
	if err != nil || !d.Allowed {
		t.Fatalf("%+v, %v", d, err)
	}
	l.sender.offset.Store(time.Hour.Milliseconds())
	if err := l.Refund(t.Context(), d.Charges()...); err != nil {
		t.Error(err)
	}
}

// On a cluster every key of a decision has the same hash tag.
func TestClusterKeysShareOneSlot(t *testing.T) {
	t.Parallel()
	client := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"127.0.0.1:1"}})
	defer func() {
		if err := client.Close(); err != nil {
			t.Error(err)
		}
	}()
	l, err := New(client, Config{})
	if err != nil {
		t.Fatal(err)
	}
	charges, err := ratelimit.Charges{
		{Limit: ratelimit.Limit{Name: "user", Max: 1}, Key: "{other}"},
		{Limit: ratelimit.Limit{Name: "tokens", Max: 1, Algorithm: ratelimit.TokenBucket}},
	}.Normalize()
	if err != nil {
		t.Fatal(err)
	}
	var declared keys
	for _, c := range charges {
		declared.add(l.base, c, 100, 3)
	}
	keys := declared.appendTo(nil)[1:]
	hashed := driver.EncodeKey("{other}")
	want := []string{
		"rate_limit:{rl}:user:" + hashed + ":99", "rate_limit:{rl}:user:" + hashed + ":100", "rate_limit:{rl}:user:" + hashed + ":101",
		"rate_limit:{rl}:tokens:b60000",
	}
	for i := range want {
		if i >= len(keys) || keys[i] != want[i] {
			t.Fatalf("the keys are %q, want %q", keys, want)
		}
	}
}
