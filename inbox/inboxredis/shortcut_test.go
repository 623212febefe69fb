package inboxredis_test

import (
	"context"
	"errors"
	"log/slog"
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
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// behind is a processor that deduplicates by itself, on the fakes of inboxpgx.
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

// Redis may only say that a message is done.
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
	// A claim is not the shortcut's to end, and the copies of what it has marked end here.
	if got := client.Get(t.Context(), key(claimed)).Val(); got != "processing:token" {
		t.Errorf("a claim became %q", got)
	}
	attempts := b.manager.Stats().Attempts
	if err := process(t, f, fresh); err != nil || b.manager.Stats().Attempts != attempts {
		t.Errorf("a copy began a transaction: error %v", err)
	}
}

// hangs answers nothing until the caller gives up.
type hangs struct{ redis.Hook }

func (hangs) DialHook(next redis.DialHook) redis.DialHook { return next }

func (hangs) ProcessHook(redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, _ redis.Cmder) error { <-ctx.Done(); return ctx.Err() }
}

func (hangs) ProcessPipelineHook(redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, _ []redis.Cmder) error { <-ctx.Done(); return ctx.Err() }
}

// A Redis that hangs delays messages until three answers did not come, and then one message a second.
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

// Without Redis everything goes its way behind.
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

// What a consumer asks a processor for is that of the one behind.
func TestPassesOn(t *testing.T) {
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

// pausesSeen tells when a consumer logs that an operator has paused it.
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

// An operator pauses a store also where Redis is asked before it.
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
