package inboxredis_test

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// patient is for a machine that is busy with tests.
var patient = inboxredis.Config{Timeout: 10 * time.Second}

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

func (b *behind) fastPath(t *testing.T, client redis.UniversalClient, consumer string, h conformance.Handler, cfg inboxredis.Config) *inboxredis.FastPath {
	t.Helper()
	p, err := inboxpgx.New(b.manager, consumer, inboxpgx.Config{Entries: b.dedup})
	if err != nil {
		t.Fatal(err)
	}
	err = inboxpgx.Handle(p, conformance.Name, func(ctx context.Context, tx pgx.Tx, e conformance.Event) error {
		if err := txretrytest.Effect(tx, func() { b.add(consumer, e.Number, 1) }, func() { b.add(consumer, e.Number, -1) }); err != nil {
			return err
		}
		return h(ctx, e)
	})
	if err != nil {
		t.Fatal(err)
	}
	cfg.Namespace, cfg.Logger = consumer, slog.New(slog.DiscardHandler)
	f, err := inboxredis.NewFastPath(client, p, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestFastPath(t *testing.T) {
	t.Parallel()
	conformance.TestProcessor(t, conformance.Backend{New: func(t *testing.T) conformance.Fixture {
		client, b := redistest.New(t), newBehind()
		return conformance.Fixture{
			Processor: func(t *testing.T, consumer string, h conformance.Handler) inbox.Processor {
				return b.fastPath(t, client, consumer, h, patient)
			},
			Effects: func(_ *testing.T, consumer string, number int) int { return b.taken(consumer, number) },
		}
	}})
}

// Redis may only say that a message is done.
func TestFastPathAsksRedisFirst(t *testing.T) {
	t.Parallel()
	client, b := redistest.New(t), newBehind()
	key := func(m *inbox.Message) string { return "outbox:processed:a:" + m.ID.String() }
	var skipped []*inbox.Message
	cfg := patient
	cfg.Hooks.OnDuplicate = func(_ context.Context, m *inbox.Message) { skipped = append(skipped, m) }
	f := b.fastPath(t, client, "a", succeed, cfg)

	known, marked, claimed, fresh := event(), event(), event(), event()
	if err := errors.Join(
		client.Set(t.Context(), key(known), "anything", 0).Err(),
		client.SAdd(t.Context(), key(marked), "x").Err(),
		client.Set(t.Context(), key(claimed), "processing:token", 0).Err(),
	); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(f.Process(t.Context(), []*inbox.Message{known, claimed, marked, fresh})...); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(skipped, []*inbox.Message{known, marked}) || b.taken("a", 1) != 2 {
		t.Errorf("%d skipped, %d effects", len(skipped), b.taken("a", 1))
	}
	// A claim is not the fast path's to end, and the copies of what it has marked end here.
	if got := client.Get(t.Context(), key(claimed)).Val(); got != "processing:token" {
		t.Errorf("a claim became %q", got)
	}
	attempts := b.manager.Stats().Attempts
	if err := process(t, f, fresh); err != nil || b.manager.Stats().Attempts != attempts {
		t.Errorf("a copy began a transaction: error %v", err)
	}
}

// A Redis that hangs delays a few messages by the timeout, and no more.
func TestFastPathWithHungRedis(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.Redis)
	const n, timeout = 100, 300 * time.Millisecond
	b, skipped := newBehind(), 0
	f := b.fastPath(t, redistest.Client(t, server.URL()), "a", succeed, inboxredis.Config{
		Timeout: timeout,
		Hooks:   inboxredis.Hooks{OnDuplicate: func(context.Context, *inbox.Message) { skipped++ }},
	})
	if err := process(t, f, event()); err != nil {
		t.Fatal(err)
	}
	if err := server.Pause(); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	for range n {
		if err := process(t, f, event()); err != nil {
			t.Fatal(err)
		}
	}
	if took := time.Since(began); took > n/2*timeout {
		t.Errorf("%d messages took %v", n, took)
	}
	if err := server.Resume(); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, testenv.Patience, func() error { // it is asked again
		m := event()
		if err := errors.Join(process(t, f, m), process(t, f, m)); err != nil {
			t.Fatal(err)
		}
		if skipped == 0 {
			return errors.New("no copy is known")
		}
		return nil
	})
}

// Without Redis everything goes its way behind.
func TestFastPathWithoutRedis(t *testing.T) {
	t.Parallel()
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", MaxRetries: -1})
	defer client.Close()
	b := newBehind()
	f := b.fastPath(t, client, "a", succeed, patient)
	m := event()
	for range 2 {
		if err := process(t, f, m); err != nil {
			t.Fatal(err)
		}
	}
	if b.taken("a", 1) != 1 {
		t.Errorf("%d effects", b.taken("a", 1))
	}
}
