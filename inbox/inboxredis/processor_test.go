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
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
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

// Values that other systems leave in the key count as processed.
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
	// The other process crashed: its lease expires.
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
	noError(t, process(t, other, m))
}

// A holder that lost its claim must not affect the next holder.
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
	if !strings.Contains(log.String(), "duplicate possible") {
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

// behind is a processor that deduplicates by itself, with the fakes of inboxpgx.
type behind struct {
	manager *txretrytest.Manager
	dedup   *memory.Entries

	mu      sync.Mutex
	effects map[string]map[int]int
}

func newBehind() *behind {
	return &behind{manager: txretrytest.New(txretrytest.Config{}), dedup: memory.NewEntries(time.Hour), effects: map[string]map[int]int{}}
}

func (b *behind) add(consumer string, number, n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.effects[consumer] == nil {
		b.effects[consumer] = map[int]int{}
	}
	b.effects[consumer][number] += n
}

func (b *behind) taken(consumer string, number int) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.effects[consumer][number]
}

func (b *behind) shortcut(t *testing.T, client redis.UniversalClient, consumer string, h conformance.Handler, timeout time.Duration) *inboxredis.Processor {
	t.Helper()
	p, err := inboxpgx.New(b.manager, consumer, inboxpgx.Config{Entries: b.dedup})
	noError(t, err)
	err = inboxpgx.Handle(p, conformance.Name, func(ctx context.Context, tx pgx.Tx, e conformance.Event) error {
		if err := txretrytest.Effect(tx, func() { b.add(consumer, e.Number, 1) }, func() { b.add(consumer, e.Number, -1) }); err != nil {
			return err
		}
		return h(ctx, e)
	})
	noError(t, err)
	f, err := inboxredis.NewProcessor(client, p, inboxredis.ProcessorConfig{Namespace: consumer, Logger: slog.New(slog.DiscardHandler)})
	noError(t, err)
	f.SetTimeout(timeout)
	return f
}

func TestShortcut(t *testing.T) {
	t.Parallel()
	conformance.TestProcessor(t, conformance.Backend{New: func(t *testing.T) conformance.Fixture {
		client, b := redistest.New(t), newBehind()
		return conformance.Fixture{
			Processor: func(t *testing.T, consumer string, h conformance.Handler) inbox.Processor {
				return b.shortcut(t, client, consumer, h, testenv.Patience)
			},
			Effects: func(_ *testing.T, consumer string, number int) int { return b.taken(consumer, number) },
		}
	}})
}

// Redis may only report that a message is done.
func TestShortcutAsksRedisFirst(t *testing.T) {
	t.Parallel()
	client, b := redistest.New(t), newBehind()
	key := func(m *inbox.Message) string { return "outbox:processed:a:" + m.ID.String() }
	f := b.shortcut(t, client, "a", succeed, testenv.Patience)

	known, marked, claimed, fresh := event(), event(), event(), event()
	if err := errors.Join(
		client.Set(t.Context(), key(known), "anything", 0).Err(),
		client.SAdd(t.Context(), key(marked), "x").Err(),
		client.Set(t.Context(), key(claimed), "processing:token", 0).Err(),
	); err != nil {
		t.Fatal(err)
	}
	noError(t, errors.Join(f.Process(t.Context(), []*inbox.Message{known, claimed, marked, fresh})...))
	if b.taken("a", 1) != 2 || b.dedup.Seen("a", known.ID) || b.dedup.Seen("a", marked.ID) {
		t.Errorf("%d effects; those that Redis knows reached the store: %v, %v",
			b.taken("a", 1), b.dedup.Seen("a", known.ID), b.dedup.Seen("a", marked.ID))
	}
	// The shortcut must not end a claim. Duplicates of messages that it marked end here.
	if got := client.Get(t.Context(), key(claimed)).Val(); got != "processing:token" {
		t.Errorf("a claim became %q", got)
	}
	attempts := b.manager.Stats().Attempts
	if err := process(t, f, fresh); err != nil || b.manager.Stats().Attempts != attempts {
		t.Errorf("a copy began a transaction: error %v", err)
	}
}

// hangs does not answer until the caller gives up.
type hangs struct{ redis.Hook }

func (hangs) DialHook(next redis.DialHook) redis.DialHook { return next }

func (hangs) ProcessHook(redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, _ redis.Cmder) error { <-ctx.Done(); return ctx.Err() }
}

func (hangs) ProcessPipelineHook(redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, _ []redis.Cmder) error { <-ctx.Done(); return ctx.Err() }
}

// A Redis that hangs delays messages until three answers are missing, and then one message a second.
func TestShortcutWithHungRedis(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const timeout = 300 * time.Millisecond
		client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
		defer client.Close()
		client.AddHook(hangs{})
		f := newBehind().shortcut(t, client, "a", succeed, timeout)
		for _, want := range []time.Duration{3 * timeout, timeout} {
			began := time.Now()
			for range 100 {
				noError(t, process(t, f, event()))
			}
			if took := time.Since(began); took != want {
				t.Errorf("100 messages took %v, want %v", took, want)
			}
			time.Sleep(2 * time.Second)
		}
	})
}

// Without Redis the next processor gets everything.
func TestShortcutWithoutRedis(t *testing.T) {
	t.Parallel()
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", MaxRetries: -1, DialerRetries: 1})
	defer client.Close()
	b := newBehind()
	f := b.shortcut(t, client, "a", succeed, testenv.Patience)
	m := event()
	for range 2 {
		noError(t, process(t, f, m))
	}
	if b.taken("a", 1) != 1 {
		t.Errorf("%d effects", b.taken("a", 1))
	}
}

// The processor passes through the optional interfaces of the next processor.
func TestProcessor_passesInterfacesOfNext(t *testing.T) {
	t.Parallel()
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer client.Close()
	var alone driver.Deduplicator = newProcessor(t, client, inboxredis.ProcessorConfig{Retention: time.Hour}, succeed)
	if alone.Ledger() != nil || alone.Retention() != time.Hour {
		t.Errorf("ledger %v, retention %v", alone.Ledger(), alone.Retention())
	}
	var before driver.Deduplicator = newBehind().shortcut(t, client, "a", succeed, testenv.Patience)
	if before.Ledger() == nil || before.Retention() != driver.DefaultRetention {
		t.Errorf("ledger %v, retention %v", before.Ledger(), before.Retention())
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	before.(driver.Background).Background(ctx) // returns
	mux := inbox.NewMux()
	noError(t, mux.SetLimit("a", 3))
	limited, err := inboxredis.NewProcessor(client, mux, inboxredis.ProcessorConfig{})
	noError(t, err)
	if limit, none := limited.Limit("a"), before.(driver.Limiter).Limit("a"); limit != 3 || none != 0 {
		t.Errorf("limits %d and %d", limit, none)
	}
}

// pausesSeen notifies when a consumer logs that an operator paused it.
type pausesSeen struct {
	slog.Handler
	seen chan struct{}
}

func (pausesSeen) Enabled(context.Context, slog.Level) bool { return true }

func (p pausesSeen) WithAttrs([]slog.Attr) slog.Handler { return p }

func (p pausesSeen) Handle(_ context.Context, r slog.Record) error {
	if r.Message == "paused by an operator" {
		p.seen <- struct{}{}
	}
	return nil
}

// An operator can pause a store behind a Redis processor.
func TestPauseOfTheStoreBehind(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	store, err := inboxtest.New(txretrytest.New(txretrytest.Config{}), groupName, inboxpgx.Config{})
	noError(t, err)
	handled := make(chan struct{}, 10)
	err = inboxpgx.Handle(store, conformance.Name, func(context.Context, pgx.Tx, conformance.Event) error {
		handled <- struct{}{}
		return nil
	})
	noError(t, err)
	p, err := inboxredis.NewProcessor(client, store, inboxredis.ProcessorConfig{})
	noError(t, err)
	noError(t, store.Pause(t.Context(), "ada", "a test"))
	paused := make(chan struct{}, 10)
	c := newConsumer(t, client, p, inboxredis.Config{ConsumerConfig: inbox.ConsumerConfig{Logger: slog.New(pausesSeen{seen: paused})}})
	publish(t, client, event())
	defer start(t, c)()
	select {
	case <-paused:
	case <-handled:
		t.Fatal("a message is processed during the pause")
	case <-time.After(testenv.Patience):
		t.Fatal("the consumer does not learn of the pause")
	}
	noError(t, store.Resume(t.Context()))
	awaitHandled(t, handled)
}

// A processor that cannot be paused is never paused.
func TestNoPauseOfAMuxBehind(t *testing.T) {
	t.Parallel()
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer client.Close()
	p := newProcessor(t, client, inboxredis.ProcessorConfig{}, succeed)
	if paused, err := p.Paused(t.Context()); err != nil || paused != (driver.Pause{}) {
		t.Errorf("it is paused: %+v, %v", paused, err)
	}
	for what, err := range map[string]error{"Pause": p.Pause(t.Context(), "ada", ""), "Resume": p.Resume(t.Context())} {
		if !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func awaitHandled(t *testing.T, handled <-chan struct{}) {
	t.Helper()
	select {
	case <-handled:
	case <-time.After(testenv.Patience):
		t.Fatal("no message is processed")
	}
}
