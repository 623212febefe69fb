package group_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/engine"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
	"github.com/holdfast-go/holdfast/inbox/internal/memqueue"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/inbox/group"
	"github.com/holdfast-go/holdfast/internal/partition"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// shop has the partitions of the queue orders, each served to one process at a time.
type shop struct {
	queues    []*memqueue.Queue
	options   memqueue.Options
	outcome   atomic.Int64 // outcome of calls of sources
	processes atomic.Int64
}

func newShop() *shop {
	s := &shop{options: memqueue.Options{Exclusive: true}}
	s.options.Fault = func(memqueue.Step, *inbox.Message) memqueue.Outcome { return memqueue.Outcome(s.outcome.Load()) }
	broker := memqueue.NewBroker()
	for _, name := range partition.Names("orders", conformance.Partitions) {
		s.queues = append(s.queues, broker.Queue(name, conformance.OwnClass))
	}
	return s
}

func (s *shop) put(t *testing.T, msgs ...*inbox.Message) {
	t.Helper()
	for _, m := range msgs {
		noError(t, s.queues[partition.Of(m.Key, m.ID.String(), len(s.queues))].Put(m))
	}
}

func (s *shop) CutConnections() {
	for _, q := range s.queues {
		q.Cut()
	}
}
func (s *shop) Pause()       { s.outcome.Store(int64(memqueue.Hang)) }
func (s *shop) DropReplies() { s.outcome.Store(int64(memqueue.FailAfter)) }
func (s *shop) Heal()        { s.outcome.Store(int64(memqueue.OK)) }

// Run implements group.Members.
func (s *shop) Run(ctx context.Context) {
	s.processes.Add(1)
	defer s.processes.Add(-1)
	<-ctx.Done()
}

// Count implements group.Members.
func (s *shop) Count(context.Context) int { return int(s.processes.Load()) }

// source is the source of a partition. Like RabbitMQ it does not know whether it is served until the first
// message.
type source struct {
	*memqueue.Source
	received atomic.Bool
}

func (s *source) Served() bool { return s.received.Load() }

func (s *source) Open(ctx context.Context) (driver.Session, error) {
	opened, err := s.Source.Open(ctx)
	s.received.Store(false)
	return session{opened, s}, err
}

type session struct {
	driver.Session
	source *source
}

func (s session) Receive(ctx context.Context, most int) ([]driver.Delivery, error) {
	ds, err := s.Session.Receive(ctx, most)
	if len(ds) > 0 {
		s.source.received.Store(true)
	}
	return ds, err
}

// whole has the messages and dead letters of all partitions.
type whole struct {
	*memqueue.Source
	parts []*memqueue.Source
}

func (w whole) DeadLetters() driver.DeadLetters {
	var all []driver.DeadLetters
	for _, part := range w.parts {
		all = append(all, part.DeadLetters())
	}
	return driver.JoinDeadLetters(all...)
}

// consumer is the group of one process.
type consumer struct {
	*group.Group
	shop *shop
}

func (c consumer) DeadLetters() inbox.DeadLetters {
	return driver.NewDeadLetters(c.shop.letters(), driver.DefaultRetention, slog.New(slog.DiscardHandler))
}

func (s *shop) letters() driver.DeadLetters { return s.whole().DeadLetters() }

func (s *shop) whole() whole {
	w := whole{Source: s.queues[0].Source(s.options)}
	for _, q := range s.queues {
		w.parts = append(w.parts, q.Source(s.options))
	}
	return w
}

func (s *shop) consumer(t *testing.T, p inbox.Processor, cfg engine.Config) consumer {
	t.Helper()
	cfg.Queue, cfg.Package, cfg.Ordered = "orders", "inboxtest", true
	cfg.Logger = cmp.Or(cfg.Logger, slog.New(slog.DiscardHandler))
	own := group.Config{Consumer: cfg, Whole: s.whole(), Members: s}
	for i, q := range s.queues {
		own.Partitions = append(own.Partitions, group.Partition{Name: partition.Name("orders", i), Source: &source{Source: q.Source(s.options)}})
	}
	g, err := group.New(p, own)
	noError(t, err)
	return consumer{g, s}
}

func fixture(*testing.T) conformance.ConsumerFixture {
	s := newShop()
	return conformance.ConsumerFixture{
		SourceFixture: conformance.SourceFixture{
			DeadLetters: func(*testing.T) driver.DeadLetters { return s.letters() },
			Publish:     func(t *testing.T, msgs ...*inbox.Message) { s.put(t, msgs...) },
			Network:     s,
		},
		Parts: func(*testing.T) (all []driver.Source) {
			for _, q := range s.queues {
				all = append(all, q.Source(s.options))
			}
			return all
		},
		Consumer: func(t *testing.T, p inbox.Processor, cfg conformance.ConsumerConfig) conformance.Consumer {
			return s.consumer(t, p, engine.Config{ConsumerConfig: cfg.ConsumerConfig, MaxBodyBytes: cfg.MaxBodyBytes})
		},
	}
}

func TestPartitions(t *testing.T) {
	t.Parallel()
	conformance.TestPartitions(t, conformance.PartitionsBackend{Runs: conformance.Runs{Bubble: true}, New: fixture, Of: func(m *inbox.Message) int {
		return partition.Of(m.Key, m.ID.String(), conformance.Partitions)
	}})
}

func TestConsumer(t *testing.T) {
	t.Parallel()
	conformance.TestConsumer(t, conformance.ConsumerBackend{Runs: conformance.Runs{Bubble: true}, New: fixture, Ordered: true})
}

// handler adapts a function to a processor.
type handler func(ctx context.Context, m *inbox.Message) error

func (h handler) Process(ctx context.Context, msgs []*inbox.Message) []error {
	results := make([]error, len(msgs))
	for i, m := range msgs {
		results[i] = h(ctx, m)
	}
	return results
}

// start runs a consumer. Stop ends it and waits.
func start(t *testing.T, c consumer) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	synctest.Wait()
	return sync.OnceFunc(func() {
		cancel()
		noError(t, <-ended)
	})
}

// in returns a message of a partition.
func in(t *testing.T, n int) *inbox.Message {
	t.Helper()
	for i := range 1000 {
		key := fmt.Sprint("key-", i)
		if partition.Of(key, "", conformance.Partitions) == n {
			return &inbox.Message{ID: ids.Deterministic(time.Now(), uuid.NewString()), Name: "event", Key: key, Body: []byte("{}")}
		}
	}
	t.Fatal("no such key")
	return nil
}

// list records events in order.
type list struct {
	mu  sync.Mutex
	all []string
}

func (l *list) add(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, fmt.Sprintf(format, args...))
}

func (l *list) take() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := l.all
	l.all = nil
	return all
}

// remembering is a processor with a ledger.
type remembering struct {
	inbox.Processor
	ledger driver.Ledger
}

func (r remembering) Ledger() driver.Ledger    { return r.ledger }
func (r remembering) Retention() time.Duration { return driver.DefaultRetention }

// Messages of several partitions that may have ended the process run one after the other, and alone.
func TestSuspects_runAloneInTheProcess(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, ledger := newShop(), memory.NewLedger()
		var running, most atomic.Int64
		var done atomic.Int64
		suspects := map[uuid.UUID]bool{}
		for i := range conformance.Partitions {
			m := in(t, i)
			suspects[m.ID] = true
			s.put(t, m)
			noError(t, ledger.Start(t.Context(), m))
		}
		for _, q := range s.queues { // deliver them once, so that they are redelivered
			src := q.Source(s.options)
			one, err := src.Open(t.Context())
			noError(t, err)
			noError(t, one.Start(t.Context(), 10))
			_, err = one.Receive(t.Context(), 10)
			noError(t, errors.Join(err, one.Close(t.Context())))
		}
		for i := range 4 * conformance.Partitions {
			s.put(t, in(t, i%conformance.Partitions))
		}
		p := remembering{handler(func(_ context.Context, m *inbox.Message) error {
			n := running.Add(1)
			defer running.Add(-1)
			if suspects[m.ID] {
				time.Sleep(time.Second)
				if got := max(n, running.Load()); got > 1 {
					t.Errorf("a suspect ran beside %d others", got-1)
				}
			}
			most.Store(max(most.Load(), n))
			time.Sleep(10 * time.Millisecond)
			done.Add(1)
			return nil
		}), ledger}
		stop := start(t, s.consumer(t, p, engine.Config{}))
		time.Sleep(20 * time.Second)
		stop()
		if n := done.Load(); n != 5*conformance.Partitions {
			t.Errorf("%d messages succeeded", n)
		}
	})
}

// busy counts the work done once for all partitions.
type busy struct {
	handler
	background, watches atomic.Int64
	pause               chan driver.Pause
}

func (b *busy) Background(ctx context.Context) {
	b.background.Add(1)
	<-ctx.Done()
}

func (b *busy) Pause(context.Context, string, string) error      { return nil }
func (b *busy) Resume(context.Context) error                     { return nil }
func (b *busy) Paused(context.Context) (p driver.Pause, _ error) { return p, nil }
func (b *busy) WatchPause(ctx context.Context, f func(driver.Pause)) {
	b.watches.Add(1)
	for {
		select {
		case p := <-b.pause:
			f(p)
		case <-ctx.Done():
			return
		}
	}
}

// The processor's background work runs once, and one watched pause applies to all partitions.
func TestProcessor_worksOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newShop()
		var done atomic.Int64
		b := &busy{pause: make(chan driver.Pause), handler: func(context.Context, *inbox.Message) error {
			done.Add(1)
			return nil
		}}
		c := s.consumer(t, b, engine.Config{})
		for range 2 {
			stop := start(t, c)
			put := func() {
				for i := range conformance.Partitions {
					s.put(t, in(t, i))
				}
				time.Sleep(time.Second)
			}
			want := func(what string, n int64) {
				t.Helper()
				if got := done.Swap(0); got != n {
					t.Errorf("%s: %d messages, want %d", what, got, n)
				}
			}
			put()
			want("before the pause is known", 0)
			b.pause <- driver.Pause{}
			time.Sleep(time.Second)
			want("not paused", conformance.Partitions)
			b.pause <- driver.Pause{By: "ada", Since: time.Now()}
			synctest.Wait()
			put()
			want("paused", 0)
			b.pause <- driver.Pause{}
			time.Sleep(time.Second)
			want("resumed", conformance.Partitions)
			if n, w := b.background.Swap(0), b.watches.Swap(0); n != 1 || w != 1 {
				t.Errorf("the background ran %d times, and the pause was watched %d times", n, w)
			}
			stop()
		}
	})
}

// A time limit ends the run of all partitions, and a message limit is exact across batches.
func TestLimits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newShop()
		begin := time.Now()
		c := s.consumer(t, handler(func(context.Context, *inbox.Message) error { return nil }), engine.Config{
			ConsumerConfig: inbox.ConsumerConfig{TimeLimit: time.Minute},
		})
		noError(t, c.Run(t.Context()))
		if ran := time.Since(begin); ran < time.Minute || ran > time.Minute+time.Second {
			t.Errorf("ran for %v", ran)
		}
		for i := range 100 {
			s.put(t, in(t, i%conformance.Partitions))
		}
		var done atomic.Int64
		var failures bytes.Buffer
		c = s.consumer(t, handler(func(context.Context, *inbox.Message) error {
			time.Sleep(time.Millisecond)
			done.Add(1)
			return nil
		}), engine.Config{ConsumerConfig: inbox.ConsumerConfig{
			MessageLimit: 17, Batch: 5, Logger: slog.New(slog.NewTextHandler(&failures, &slog.HandlerOptions{Level: slog.LevelWarn})),
		}})
		for n := range int64(2) { // the limit applies to each run
			noError(t, c.Run(t.Context()))
			if got := done.Load(); got != 17*(n+1) {
				t.Errorf("%d messages after run %d", got, n+1)
			}
		}
		if failures.Len() > 0 {
			t.Errorf("logged %s", &failures)
		}
		stats, err := c.Stats(t.Context())
		noError(t, err)
		if stats.Dead == nil {
			t.Error("dead letters are not counted")
		}
	})
}

// A partition is given up while a message waits for its retry: the order of its key stays, and the process is
// ready all the time.
func TestLeveling_keepsOrderAndReadiness(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newShop()
		var broken atomic.Bool
		broken.Store(true)
		var l list
		cfg := engine.Config{ConsumerConfig: inbox.ConsumerConfig{Retry: inbox.RetryPolicy{MaxAttempts: 1000, BaseDelay: time.Hour, MaxDelay: time.Hour}}}
		process := func(name string) handler {
			return func(_ context.Context, m *inbox.Message) error {
				if m.Name == "first" && broken.Load() {
					return errors.New("for now")
				}
				l.add("%s %s %s", m.Queue, m.Name, name)
				return nil
			}
		}
		put := func(name string) {
			for i := range conformance.Partitions {
				m := in(t, i)
				m.Name = name
				s.put(t, m)
			}
		}
		put("first")
		put("second")
		one := s.consumer(t, process("one"), cfg)
		stopOne := start(t, one)
		time.Sleep(time.Minute)
		if got := l.take(); len(got) != 0 {
			t.Fatalf("processed %v before the first message of the key", got)
		}
		two := s.consumer(t, process("two"), cfg)
		stopTwo := start(t, two)
		broken.Store(false)
		for range 600 { // a minute
			time.Sleep(100 * time.Millisecond)
			if err := errors.Join(one.Ready(t.Context()), two.Ready(t.Context())); err != nil {
				t.Fatalf("not ready: %v", err)
			}
		}
		got := l.take()
		slices.SortStableFunc(got, func(a, b string) int { return strings.Compare(a[:len("orders.0")], b[:len("orders.0")]) })
		if len(got) != 4 { // messages of the partitions that were given up; the others wait for an hour
			t.Fatalf("processed %v", got)
		}
		for i := 0; i < len(got); i += 2 {
			if !strings.HasSuffix(got[i], "first two") || !strings.HasSuffix(got[i+1], "second two") || got[i][:8] != got[i+1][:8] {
				t.Errorf("processed %v", got)
			}
		}
		stopTwo()
		stopOne()
		if err := one.Ready(t.Context()); err == nil {
			t.Error("ready although it does not run")
		}
	})
}

// A third process gets its share, one that hangs loses its partitions, and a process that does not know its
// share keeps all.
func TestLeveling_followsTheProcesses(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newShop()
		var l list
		launch := func(name string) (stop func()) {
			return start(t, s.consumer(t, handler(func(_ context.Context, m *inbox.Message) error {
				l.add("%s %s", name, m.Queue)
				return nil
			}), engine.Config{}))
		}
		shares := func() (of map[string]int) {
			l.take()
			for i := range 2 * conformance.Partitions {
				s.put(t, in(t, i%conformance.Partitions))
			}
			time.Sleep(time.Second)
			of = map[string]int{}
			got := l.take()
			slices.Sort(got)
			for _, served := range slices.Compact(got) {
				of[served[:1]]++
			}
			return of
		}
		await := func(want map[string]int) {
			t.Helper()
			var got map[string]int
			for range 60 { // two minutes
				if got = shares(); fmt.Sprint(got) == fmt.Sprint(want) {
					return
				}
				time.Sleep(time.Second)
			}
			t.Fatalf("the processes serve %v partitions, want %v", got, want)
		}
		stopA := launch("a")
		await(map[string]int{"a": 4})
		s.processes.Store(0) // the count is not known
		time.Sleep(time.Minute)
		await(map[string]int{"a": 4})
		s.processes.Store(1)
		stopB := launch("b")
		await(map[string]int{"a": 2, "b": 2})
		s.CutConnections() // the first to ask is served
		await(map[string]int{"a": 2, "b": 2})
		stopC := launch("c")
		time.Sleep(time.Minute)
		if got := shares(); got["a"]+got["b"]+got["c"] != 4 || max(got["a"], got["b"], got["c"]) != 2 {
			t.Errorf("three processes serve %v partitions", got)
		}
		stopA()
		await(map[string]int{"b": 2, "c": 2})
		stopC()
		await(map[string]int{"b": 4})
		stopB()
	})
}

// While a partition is missing, the others are served, and Ready names the missing one.
func TestMissingPartition_stopsNoOther(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newShop()
		var done atomic.Int64
		c := s.consumer(t, handler(func(context.Context, *inbox.Message) error {
			done.Add(1)
			return nil
		}), engine.Config{})
		defer start(t, c)()
		s.queues[2].Delete()
		time.Sleep(time.Second)
		for _, i := range []int{0, 1, 3} {
			s.put(t, in(t, i))
		}
		time.Sleep(time.Second)
		if n := done.Load(); n != 3 {
			t.Errorf("%d messages of the other partitions", n)
		}
		if err := c.Ready(t.Context()); !errors.Is(err, driver.ErrMissing) || !strings.Contains(err.Error(), "orders.2") {
			t.Errorf("ready: %v", err)
		}
		s.queues[2].Declare()
		time.Sleep(10 * time.Second)
		noError(t, c.Ready(t.Context()))
	})
}

// Run ends within ShutdownTimeout, even if handlers and the background work do not.
func TestRun_endsInTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newShop()
		hang := make(chan struct{})
		defer close(hang)
		c := s.consumer(t, hanging{handler(func(context.Context, *inbox.Message) error {
			<-hang
			return nil
		}), hang}, engine.Config{ConsumerConfig: inbox.ConsumerConfig{ShutdownTimeout: 10 * time.Second}})
		stop := start(t, c)
		s.put(t, in(t, 0), in(t, 1))
		time.Sleep(time.Second)
		if err := c.Run(t.Context()); err == nil {
			t.Error("Run runs twice")
		}
		begin := time.Now()
		stop()
		if took := time.Since(begin); took > 10*time.Second {
			t.Errorf("Run ended after %v", took)
		}
	})
}

// hanging is a processor whose background work never ends.
type hanging struct {
	handler
	end chan struct{}
}

func (h hanging) Background(context.Context) { <-h.end }

func noError(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
