package ratelimitredis

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/breaker"
)

// Start is where the clock of NewWithClock starts, and that of a synctest bubble.
var Start = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

// NewWithClock returns a limiter whose scripts take the time from a key, and what moves it. The
// limiter's own clock stays as it is, as on a machine that is off.
func NewWithClock(t *testing.T, client redis.UniversalClient, cfg Config) (*Limiter, func(t *testing.T, d time.Duration)) {
	t.Helper()
	cfg.DenyCache = -1 // it trusts that both clocks run alike
	l, err := New(client, cfg)
	if err != nil {
		t.Fatal(err)
	}
	key := l.base + "clock"
	for _, s := range []**script{&l.decideScript, &l.refundScript, &l.resetScript} {
		source := strings.Replace((*s).source, "call('TIME')", "{call('GET', '"+key+"') / 1000, 0}", 1)
		if source == (*s).source {
			t.Fatal("the script asks for the time in another way")
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

// OnePipeline lets one call be under way at a time. It is called before the first.
func (l *Limiter) OnePipeline() *Limiter {
	l.lanes.Most = 1
	return l
}

// Probing sets how often a Redis that has failed is asked again. It is called before the first call.
func (l *Limiter) Probing(every time.Duration) *Limiter {
	l.breaker = breaker.New(failuresInARow, every)
	return l
}

// Load returns how many pipelines are under way, and how many calls wait for one.
func (l *Limiter) Load() (pipelines, waiting int) { return l.lanes.Load() }
