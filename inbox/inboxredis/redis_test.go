package inboxredis_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func event() *inbox.Message {
	return &inbox.Message{ID: ids.New(), Name: conformance.Name, Body: []byte(`{"number":1}`), Attempt: 1}
}

func process(t *testing.T, p inbox.Processor, m *inbox.Message) error {
	t.Helper()
	return p.Process(t.Context(), []*inbox.Message{m})[0]
}

func newProcessor(t *testing.T, client redis.UniversalClient, cfg inboxredis.ProcessorConfig, fn func(context.Context, conformance.Event) error) *inboxredis.Processor {
	t.Helper()
	mux := inbox.NewMux()
	noError(t, inbox.Handle(mux, conformance.Name, fn))
	p, err := inboxredis.NewProcessor(client, mux, cfg)
	noError(t, err)
	return p
}

func succeed(context.Context, conformance.Event) error { return nil }

func mustNotRun(t *testing.T) func(context.Context, conformance.Event) error {
	return func(context.Context, conformance.Event) error {
		t.Error("the handler ran")
		return nil
	}
}

func TestProcessor(t *testing.T) {
	t.Parallel()
	type key struct {
		consumer string
		number   int
	}
	conformance.TestProcessor(t, conformance.Backend{New: func(t *testing.T) conformance.Fixture {
		client := redistest.New(t)
		var mu sync.Mutex
		effects := map[key]int{}
		return conformance.Fixture{
			Processor: func(t *testing.T, consumer string, h conformance.Handler) inbox.Processor {
				return newProcessor(t, client, inboxredis.ProcessorConfig{Namespace: consumer}, func(ctx context.Context, e conformance.Event) error {
					if err := h(ctx, e); err != nil {
						return err
					}
					mu.Lock()
					defer mu.Unlock()
					effects[key{consumer, e.Number}]++
					return nil
				})
			},
			Effects: func(_ *testing.T, consumer string, number int) int {
				mu.Lock()
				defer mu.Unlock()
				return effects[key{consumer, number}]
			},
		}
	}})
}

func TestNewProcessorRefuses(t *testing.T) {
	t.Parallel()
	_, err := inboxredis.NewProcessor(nil, nil, inboxredis.ProcessorConfig{Namespace: "a:b", Lease: time.Millisecond, Retention: -1})
	for _, part := range []string{"client", "next", "ProcessorConfig.Namespace", "ProcessorConfig.Lease", "ProcessorConfig.Retention"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("%s is not named in %v", part, err)
		}
	}
}

// The key and its values are a public format.
func TestKeys(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	for namespace, prefix := range map[string]string{"": "outbox:processed:", "billing": "outbox:processed:billing:"} {
		m := event()
		key := prefix + m.ID.String()
		p := newProcessor(t, client, inboxredis.ProcessorConfig{Namespace: namespace}, func(ctx context.Context, _ conformance.Event) error {
			value, ttl := client.Get(ctx, key).Val(), client.PTTL(ctx, key).Val()
			if !strings.HasPrefix(value, "processing:") || ttl <= 0 || ttl > time.Minute {
				t.Errorf("while it is processed: %s = %q for %v", key, value, ttl)
			}
			return nil
		})
		noError(t, process(t, p, m))
		value, ttl := client.Get(t.Context(), key).Val(), client.PTTL(t.Context(), key).Val()
		if token, ok := strings.CutPrefix(value, "done:"); !ok || len(token) < 26 || ttl > 192*time.Hour || ttl < 191*time.Hour {
			t.Errorf("afterwards: %s = %q for %v", key, value, ttl)
		}
	}
}

func TestFailureRemovesTheKey(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	for _, fail := range []func(context.Context, conformance.Event) error{
		func(context.Context, conformance.Event) error { return errors.New("boom") },
		func(context.Context, conformance.Event) error { panic("boom") },
	} {
		if err := process(t, newProcessor(t, client, inboxredis.ProcessorConfig{}, fail), event()); err == nil {
			t.Error("no error")
		}
	}
	if keys := client.Keys(t.Context(), "*").Val(); len(keys) != 0 {
		t.Errorf("keys left: %v", keys)
	}
}

// What other systems leave in the key counts as processed.
func TestForeignMarks(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	for name, mark := range map[string]func(key string) error{
		"set":   func(key string) error { return client.SAdd(t.Context(), key, "handler").Err() },
		"hash":  func(key string) error { return client.HSet(t.Context(), key, "a", "b").Err() },
		"text":  func(key string) error { return client.Set(t.Context(), key, "1", 0).Err() },
		"empty": func(key string) error { return client.Set(t.Context(), key, "", 0).Err() },
	} {
		m := event()
		noError(t, mark("outbox:processed:"+m.ID.String()))
		if err := process(t, newProcessor(t, client, inboxredis.ProcessorConfig{}, mustNotRun(t)), m); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestClaimOfAnother(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	m := event()
	key := "outbox:processed:" + m.ID.String()
	noError(t, client.Set(t.Context(), key, "processing:other", time.Minute).Err())
	p := newProcessor(t, client, inboxredis.ProcessorConfig{}, succeed)
	err := process(t, p, m)
	f := driver.Classify(err)
	if !errors.Is(err, inboxredis.ErrInProgress) || f.Action != driver.ActionRetry || f.Counted || f.Unavailable {
		t.Fatalf("%v classified %+v", err, f)
	}
	// The other one has died: its lease runs out.
	noError(t, client.PExpire(t.Context(), key, 100*time.Millisecond).Err())
	testenv.Eventually(t, func() error { return process(t, p, m) })
}

func TestLeaseIsProlonged(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	m := event()
	key := "outbox:processed:" + m.ID.String()
	other := newProcessor(t, client, inboxredis.ProcessorConfig{}, mustNotRun(t))
	p := newProcessor(t, client, inboxredis.ProcessorConfig{Lease: 3 * time.Second}, func(ctx context.Context, _ conformance.Event) error {
		before := client.PTTL(ctx, key).Val()
		testenv.Eventually(t, func() error {
			left := client.PTTL(ctx, key).Val()
			defer func() { before = left }()
			if left <= before {
				return fmt.Errorf("the lease ends in %v", left)
			}
			return nil
		})
		if err := process(t, other, m); !errors.Is(err, inboxredis.ErrInProgress) {
			t.Errorf("a copy came to %v", err)
		}
		return nil
	})
	noError(t, process(t, p, m))
	if err := process(t, other, m); err != nil {
		t.Error(err)
	}
}

// A holder that has lost its claim does no harm to the next one.
func TestLostClaim(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	quiet := slog.New(slog.DiscardHandler)
	for name, tt := range map[string]struct {
		now    string // in the key when the handler returns; "" = none
		result error
		want   string // prefix of the key's value afterwards; "" = none
	}{
		"failed, claimed by another":    {"processing:other", errors.New("boom"), "processing:other"},
		"failed, done by another":       {"done:other", errors.New("boom"), "done:other"},
		"failed, expired":               {"", errors.New("boom"), ""},
		"succeeded, claimed by another": {"processing:other", nil, "done:"},
		"succeeded, done by another":    {"done:other", nil, "done:other"},
		"succeeded, expired":            {"", nil, "done:"},
	} {
		m := event()
		key := "outbox:processed:" + m.ID.String()
		p := newProcessor(t, client, inboxredis.ProcessorConfig{Logger: quiet}, func(ctx context.Context, _ conformance.Event) error {
			err := client.Del(ctx, key).Err()
			if tt.now != "" {
				err = client.Set(ctx, key, tt.now, time.Minute).Err()
			}
			if err != nil {
				t.Error(err)
			}
			return tt.result
		})
		if err := process(t, p, m); !errors.Is(err, tt.result) {
			t.Errorf("%s: %v", name, err)
		}
		got := client.Get(t.Context(), key).Val()
		if !strings.HasPrefix(got, tt.want) || (tt.want == "") != (got == "") {
			t.Errorf("%s: key holds %q, want %q", name, got, tt.want)
		}
	}
}

func TestRedisDown(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.Redis)
	client := redistest.Client(t, server.URL())
	var log bytes.Buffer
	runs, breakIt := 0, false
	p := newProcessor(t, client, inboxredis.ProcessorConfig{Logger: slog.New(slog.NewTextHandler(&log, nil))}, func(context.Context, conformance.Event) error {
		runs++
		if breakIt {
			return server.Kill()
		}
		return nil
	})
	noError(t, process(t, p, event()))
	breakIt = true
	if err := process(t, p, event()); err != nil {
		t.Errorf("a message whose effect was taken: %v", err)
	}
	if !strings.Contains(log.String(), "a copy may take effect") {
		t.Errorf("log = %s", log.String())
	}
	err := process(t, p, event())
	if f := driver.Classify(err); !errors.Is(err, driver.ErrUnavailable) || f.Counted || runs != 2 {
		t.Errorf("%v classified %+v after %d runs", err, f, runs)
	}
	breakIt = false
	noError(t, server.Start(t.Context()))
	testenv.Eventually(t, func() error { return process(t, p, event()) })
}

func TestCheck(t *testing.T) {
	t.Parallel()
	for policy, want := range map[string]string{"noeviction": "", "allkeys-lru": "may evict the marks"} {
		t.Run(policy, func(t *testing.T) {
			t.Parallel()
			server := testenv.Private(t, testenv.Redis, "--maxmemory", "100mb", "--maxmemory-policy", policy)
			p := newProcessor(t, redistest.Client(t, server.URL()), inboxredis.ProcessorConfig{}, succeed)
			err := p.Check(t.Context())
			if want == "" && err != nil {
				t.Errorf("Check: %v", err)
			}
			if _, mends := errors.AsType[interface {
				error
				Mend() string
			}](err); want != "" && (!mends || !strings.Contains(err.Error(), want)) {
				t.Errorf("Check: %v, want a finding with %q", err, want)
			}
		})
	}
}
