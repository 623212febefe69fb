package inboxredis_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/partition"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

const partitions = 4

// processor is a function as an inbox.Processor.
type processor func(*inbox.Message) error

// Process implements inbox.Processor.
func (p processor) Process(_ context.Context, msgs []*inbox.Message) []error {
	results := make([]error, len(msgs))
	for i, m := range msgs {
		results[i] = p(m)
	}
	return results
}

// partitioned returns a consumer of all partitions, as of one more process, which is set up.
func partitioned(t *testing.T, client redis.UniversalClient, p processor) *inboxredis.Consumer {
	t.Helper()
	cfg := orderedBy(partitions)
	cfg.Group, cfg.Concurrency = groupName, 2
	cfg.Retry = inbox.RetryPolicy{MaxAttempts: 50, BaseDelay: 10 * time.Millisecond, MaxDelay: 30 * time.Millisecond}
	return newConsumer(t, client, p, cfg)
}

func keyed(key string) *inbox.Message {
	return &inbox.Message{ID: ids.New(), Name: "order.placed", Key: key, Body: []byte("{}"), PublishedAt: time.Now()}
}

// keyOf returns a key of a partition.
func keyOf(t *testing.T, n int) string {
	t.Helper()
	for i := range 1000 {
		if key := fmt.Sprintf("key-%d", i); partition.Of(key, "", partitions) == n {
			return key
		}
	}
	t.Fatalf("no key of partition %d", n)
	return ""
}

func TestPartitionsRefused(t *testing.T) {
	t.Parallel()
	client := redis.NewClient(&redis.Options{})
	defer client.Close()
	for name, tt := range map[string]struct {
		stream string
		cfg    inboxredis.Config
		want   string // none: it is not refused
	}{
		"not ordered": {stream, inboxredis.Config{Partitions: 2}, "needs ConsumerConfig.Ordered"},
		"own keys":    {stream, inboxredis.Config{Partitions: 2, ConsumerConfig: inbox.ConsumerConfig{Ordered: true, Key: func(*inbox.Message) string { return "" }}}, "excludes ConsumerConfig.Key"},
		"parked keys": {stream, inboxredis.Config{Partitions: 2, ConsumerConfig: inbox.ConsumerConfig{Ordered: true, ParkKeys: true}}, "excludes ConsumerConfig.ParkKeys"},
		"too many":    {stream, orderedBy(65), "65 is not from 0 to 64"},
		"negative":    {stream, orderedBy(-1), "-1 is not from 0 to 64"},
		"name":        {strings.Repeat("s", 511), orderedBy(2), "longer than 512 bytes"},
		"one":         {stream, inboxredis.Config{Partitions: 1}, ""},
		"most":        {stream, orderedBy(64), ""},
	} {
		_, err := inboxredis.NewConsumer(client, tt.stream, inbox.NewMux(), tt.cfg)
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", name, err, tt.want)
		}
	}
}

// Setup makes all partitions, Check looks at all, and for one too many.
func TestPartitionsSetupAndCheck(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	cfg := orderedBy(partitions)
	cfg.Logger = slog.New(slog.DiscardHandler)
	c, err := inboxredis.NewConsumer(client, stream, inbox.NewMux(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	missing := func() (streams []string) {
		err := c.Check(t.Context())
		for i := range partitions + 1 {
			if name := partition.Name(stream, i); err != nil && strings.Contains(err.Error(), fmt.Sprintf("%q", name)) {
				streams = append(streams, name)
			}
		}
		return streams
	}
	if got := missing(); len(got) != partitions {
		t.Errorf("before Setup Check names %v", got)
	}
	for range 2 {
		if err := c.Setup(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if got := missing(); len(got) != 0 {
		t.Errorf("after Setup Check names %v", got)
	}
	keys := client.Keys(t.Context(), stream+"*").Val()
	if slices.Sort(keys); !slices.Equal(keys, partition.Names(stream, partitions)) {
		t.Errorf("Setup made %v", keys)
	}
	options := *client.Options()
	options.PoolSize = partitions
	narrow := redis.NewClient(&options)
	defer narrow.Close()
	if err := partitioned(t, narrow, nil).Check(t.Context()); err == nil || !strings.Contains(err.Error(), "the client has 4 connections") {
		t.Errorf("with a small pool Check finds %v", err)
	}
	publishTo(t, client, partitions+1, keyed(extraKey(t)))
	if got := missing(); !slices.Equal(got, []string{partition.Name(stream, partitions)}) {
		t.Errorf("with one partition too many Check names %v", got)
	}
}

// extraKey is a key of the partition that another number of them would add.
func extraKey(t *testing.T) string {
	t.Helper()
	for i := range 1000 {
		if key := fmt.Sprintf("key-%d", i); partition.Of(key, "", partitions+1) == partitions {
			return key
		}
	}
	t.Fatal("no such key")
	return ""
}

// What outboxredis writes is in the partition of its key, and comes from there.
func TestPartitionOfAMessage(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	var mu sync.Mutex
	got := map[uuid.UUID]string{}
	c := partitioned(t, client, func(m *inbox.Message) error {
		mu.Lock()
		defer mu.Unlock()
		got[m.ID] = m.Queue
		return nil
	})
	want := map[uuid.UUID]string{}
	var msgs []*inbox.Message
	for i := range 200 {
		m := keyed(fmt.Sprintf("key-%d", i%20))
		if i%4 == 0 {
			m.Key = "" // they are spread by their ids
		}
		want[m.ID] = partition.Name(stream, partition.Of(m.Key, m.ID.String(), partitions))
		msgs = append(msgs, m)
	}
	publishTo(t, client, partitions, msgs...)
	defer start(t, c)()
	testenv.Eventually(t, func() error {
		mu.Lock()
		defer mu.Unlock()
		if len(got) < len(want) {
			return fmt.Errorf("%d of %d messages", len(got), len(want))
		}
		return nil
	})
	mu.Lock()
	defer mu.Unlock()
	for id, queue := range want {
		if got[id] != queue {
			t.Errorf("message %s came from %s, want %s", id, got[id], queue)
		}
	}
}

// effects are those of keyed messages in their order, as processors that remember have them.
type effects struct {
	t      *testing.T
	number map[uuid.UUID]int

	mu      sync.Mutex
	next    map[string]int
	running map[string]bool
	by      [3]atomic.Int64 // of each process
}

func (e *effects) process(process int) processor {
	return func(m *inbox.Message) error {
		e.mu.Lock()
		if e.running[m.Key] {
			e.t.Errorf("two messages of %s are processed at once", m.Key)
		}
		e.running[m.Key] = true
		e.mu.Unlock()
		time.Sleep(time.Duration(rand.IntN(6000)) * time.Microsecond)
		e.mu.Lock()
		defer e.mu.Unlock()
		e.running[m.Key] = false
		if rand.IntN(10) == 0 {
			return errors.New("at random")
		}
		n := e.number[m.ID]
		if n > e.next[m.Key] {
			e.t.Errorf("number %d of %s while %d is due", n, m.Key, e.next[m.Key])
		}
		e.next[m.Key] = max(e.next[m.Key], n+1)
		e.by[process].Add(1)
		return nil
	}
}

func (e *effects) await(n int) {
	e.t.Helper()
	testenv.Eventually(e.t, func() error {
		e.mu.Lock()
		defer e.mu.Unlock()
		done := 0
		for _, next := range e.next {
			done += next
		}
		if done < n {
			return fmt.Errorf("%d of %d messages took effect", done, n)
		}
		return nil
	})
}

// Two processes share the partitions; one of them ends and another begins meanwhile. The keys keep
// their order, and nothing is lost.
func TestPartitionsKeepTheOrder(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	const keys, each = 16, 300
	e := &effects{t: t, number: map[uuid.UUID]int{}, next: map[string]int{}, running: map[string]bool{}}
	var msgs []*inbox.Message
	for i := range keys * each {
		m := keyed(fmt.Sprintf("key-%d", i%keys))
		e.number[m.ID] = i / keys
		msgs = append(msgs, m)
	}
	first, second, third := partitioned(t, client, e.process(0)), partitioned(t, client, e.process(1)), partitioned(t, client, e.process(2))
	endFirst, endSecond, endThird := start(t, first), start(t, second), func() {}
	awaitShares(t, client, 2, 2)
	sent := 0
	for chunk := range slices.Chunk(msgs, len(msgs)/60) { // all the while, so that partitions change hands amid their messages
		publishTo(t, client, partitions, chunk...)
		switch sent++; sent {
		case 10:
			e.await(sent * len(chunk) / 2)
			endFirst()
		case 25:
			endThird = start(t, third)
		case 59:
			awaitShares(t, client, 2, 2) // the third has its part of the last chunk
		}
		time.Sleep(100 * time.Millisecond)
	}
	e.await(keys * each)
	endSecond()
	endThird()
	for i := range e.by {
		if e.by[i].Load() == 0 {
			t.Errorf("process %d has processed nothing", i)
		}
	}
	if letters, err := first.DeadLetters().List(t.Context(), inbox.Filter{}); len(letters) != 0 || err != nil {
		t.Errorf("%d dead letters, %v", len(letters), err)
	}
	for i := range partitions {
		pending := client.XPending(t.Context(), partition.Name(stream, i), groupName).Val()
		if pending.Count != 0 {
			t.Errorf("%d messages of partition %d are left", pending.Count, i)
		}
	}
}
