package inboxredis_test

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/internal/partition"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
	"github.com/holdfast-go/holdfast/internal/trace/parked"
	outbox "github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxredis"
)

const stream = "orders"

// The suites run completely on a shared stream. On other streams only the subtests run that depend on the kind of
// stream.
func runsOf(kind string) conformance.Runs {
	return conformance.Runs{Nightly: testenv.Nightly, Variant: kind != "shared"}
}

func TestSource(t *testing.T) {
	t.Parallel()
	redistest.URL(t) // skips before there are subtests
	for name, ordered := range map[string]bool{"shared": false, "ordered": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conformance.TestSource(t, conformance.SourceBackend{Runs: runsOf(name), New: func(t *testing.T) conformance.SourceFixture {
				return newFixture(t, ordered).source()
			}})
		})
	}
}

// groupName is the name of the consumers and of their group.
const groupName = "billing"

// fixture is a stream with a group.
type fixture struct {
	ordered         bool
	partitions      int
	network         *testenv.Proxy
	direct, through *redis.Client // through the network
}

func newFixture(t *testing.T, ordered bool) *fixture {
	t.Helper()
	return newPartitions(t, ordered, 1)
}

func newPartitions(t *testing.T, ordered bool, partitions int) *fixture {
	t.Helper()
	url := redistest.URL(t)
	proxy := testenv.NewProxy(t, url)
	f := &fixture{ordered: ordered, partitions: partitions, network: proxy, direct: redistest.Client(t, url), through: redistest.Client(t, proxy.URL())}
	f.setup(t, groupName)
	return f
}

func (f *fixture) setup(t *testing.T, group string) {
	t.Helper()
	noError(t, inboxredis.Setup(t.Context(), f.direct, stream, inboxredis.Config{Group: group, Partitions: f.partitions, ConsumerConfig: inbox.ConsumerConfig{Ordered: f.ordered}}))
}

func (f *fixture) open(t *testing.T, client redis.UniversalClient, group string) (driver.Source, driver.DeadLetters) {
	t.Helper()
	all, letters := f.parts(t, client, group)
	return all[0], letters
}

// parts returns the sources of all partitions, and their dead letters.
func (f *fixture) parts(t *testing.T, client redis.UniversalClient, group string) ([]driver.Source, driver.DeadLetters) {
	t.Helper()
	all, letters, err := inboxredis.NewSources(client, stream, inboxredis.Config{Group: group, Partitions: f.partitions, ConsumerConfig: inbox.ConsumerConfig{
		Name: groupName, Ordered: f.ordered, Classes: []string{conformance.OwnClass}, Logger: slog.New(slog.DiscardHandler),
	}})
	noError(t, err)
	return all, letters
}

// source is the source for the suites.
func (f *fixture) source() conformance.SourceFixture {
	return conformance.SourceFixture{
		New: func(t *testing.T) driver.Source {
			s, _ := f.open(t, f.through, groupName)
			return s
		},
		DeadLetters: func(t *testing.T) driver.DeadLetters {
			_, l := f.open(t, f.direct, groupName)
			return l
		},
		Publish: func(t *testing.T, msgs ...*inbox.Message) { publishTo(t, f.direct, f.partitions, msgs...) },
		Network: f.network,
		Delete: func(t *testing.T) func() {
			noError(t, f.direct.FlushDB(t.Context()).Err())
			return func() { f.setup(t, groupName) }
		},
		Refuse: func(t *testing.T, class string) func() {
			var keys []string
			for _, name := range partition.Names(stream, f.partitions) {
				keys = append(keys, "{"+name+"}:"+groupName+":failed."+class)
			}
			for _, key := range keys {
				noError(t, f.direct.Set(t.Context(), key, "", 0).Err())
			}
			return func() {
				for _, key := range keys {
					noError(t, f.direct.Del(t.Context(), key).Err())
				}
			}
		},
		Another: func(t *testing.T) driver.Source {
			f.setup(t, "mailing")
			s, _ := f.open(t, f.direct, "mailing")
			return s
		},
	}
}

func setup(t *testing.T, client redis.UniversalClient, group string) {
	t.Helper()
	noError(t, inboxredis.Setup(t.Context(), client, stream, inboxredis.Config{Group: group}))
}

// publish adds messages to the stream like a relay.
func publish(t *testing.T, client redis.UniversalClient, msgs ...*inbox.Message) {
	t.Helper()
	publishTo(t, client, 1, msgs...)
}

// publishAsOthers puts a message into the stream with the fields that only other senders write.
func publishAsOthers(t *testing.T, client redis.UniversalClient, partitions int, m *inbox.Message) {
	t.Helper()
	headers, err := json.Marshal(m.Headers)
	noError(t, err)
	to, id := stream, m.ID.String()
	if partitions > 1 {
		to = partition.Name(stream, partition.Of(m.Key, id, partitions))
	}
	noError(t, client.XAdd(t.Context(), &redis.XAddArgs{Stream: to, Values: []any{
		"id", id, "name", m.Name, "key", m.Key, "created-at", m.PublishedAt.UTC().Format(time.RFC3339Nano),
		"headers", headers, "content-type", m.ContentType, "body", m.Body,
		"content-encoding", m.ContentEncoding, "correlation-id", m.CorrelationID, "reply-to", m.ReplyTo,
	}}).Err())
}

// publishTo adds messages to this number of partitions.
func publishTo(t *testing.T, client redis.UniversalClient, partitions int, msgs ...*inbox.Message) {
	t.Helper()
	p, err := outboxredis.NewPublisher(client, outboxredis.Config{Stream: stream, Partitions: map[string]int{stream: partitions}})
	noError(t, err)
	var all sync.WaitGroup
	errs := make([]error, len(msgs))
	for i, m := range msgs {
		if m.ContentEncoding+m.CorrelationID+m.ReplyTo != "" {
			publishAsOthers(t, client, partitions, m)
			continue
		}
		all.Add(1)
		p.Publish(t.Context(), outbox.Message{
			ID: m.ID, Name: m.Name, Body: m.Body, ContentType: m.ContentType, Key: m.Key, Headers: m.Headers, CreatedAt: m.PublishedAt,
		}, func(err error) {
			errs[i] = err
			all.Done()
		})
	}
	all.Wait()
	for _, err := range errs {
		if err != nil {
			t.Fatal(fmt.Errorf("publish: %w", err))
		}
	}
}

// open starts a session with a window. The test must close it.
func open(t *testing.T, source driver.Source, window int) driver.Session {
	t.Helper()
	s, err := source.Open(t.Context())
	noError(t, err)
	noError(t, s.Start(t.Context(), window))
	return s
}

// receive receives n messages.
func receive(t *testing.T, s driver.Session, n int) (all []driver.Delivery) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
	defer cancel()
	for len(all) < n {
		ds, err := s.Receive(ctx, n-len(all))
		if err != nil {
			t.Fatalf("%d of %d messages: %v", len(all), n, err)
		}
		all = append(all, ds...)
	}
	return all
}

// running runs a source until the test ends.
func running(t *testing.T, source driver.Source) driver.Source {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		source.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
	testenv.Eventually(t, func() error { return source.Ready(t.Context()) })
	return source
}

// newSource returns a source of the fixture's group.
func newSource(t *testing.T, client redis.UniversalClient, cfg inboxredis.Config) driver.Source {
	t.Helper()
	cfg.Group, cfg.Name, cfg.Logger = groupName, groupName, slog.New(slog.DiscardHandler)
	all, _, err := inboxredis.NewSources(client, stream, cfg)
	noError(t, err)
	return all[0]
}

// The tests mostly wait for servers, so eight run at once.
func TestMain(m *testing.M) {
	if err := flag.Set("test.parallel", "8"); err != nil {
		panic(err)
	}
	os.Exit(testenv.Run(m))
}

func noError(t *testing.T, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}

// Entries of a crashed process are found among many in flight, with few commands.
func TestClaimAmongMany(t *testing.T) {
	t.Parallel()
	client := redistest.Client(t, testenv.Private(t, testenv.Redis).URL())
	setup(t, client, groupName)
	const n = 20_000
	fill(t, client, stream, n)
	client.XGroupSetID(t.Context(), stream, groupName, "0")
	read, err := client.XReadGroup(t.Context(), &redis.XReadGroupArgs{Group: groupName, Consumer: "c", Streams: []string{stream, ">"}}).Result()
	noError(t, err)
	noError(t, client.Do(t.Context(), "XCLAIM", stream, groupName, "c", 0, read[0].Messages[n/2].ID, "IDLE", time.Hour.Milliseconds()).Err())
	receive(t, open(t, newSource(t, client, inboxredis.Config{}), 2), 1)
	stats, err := client.InfoMap(t.Context(), "commandstats").Result()
	noError(t, err)
	calls, _, _ := strings.Cut(strings.TrimPrefix(stats["Commandstats"]["cmdstat_xautoclaim"], "calls="), ",")
	if n, err := strconv.Atoi(calls); err != nil || n < 1 || n > 20 {
		t.Errorf("XAUTOCLAIM was called %q times", calls)
	}
}

// A process that lost the lease because it was frozen receives nothing more, and its retries are refused. The next
// owner gets all pending entries, in order, before new ones.
func TestLease(t *testing.T) {
	t.Parallel()
	f := newFixture(t, true)
	var want []*inbox.Message
	for range 8 {
		want = append(want, event())
	}
	publish(t, f.direct, want[:6]...)
	stopped, _ := f.open(t, f.direct, groupName)
	before := open(t, stopped, 3)
	ds := receive(t, before, 3)                                                                 // its lease is not extended
	if err := f.direct.Del(t.Context(), "{"+stream+"}:"+groupName+":owner").Err(); err != nil { // as if it had expired
		t.Fatal(err)
	}
	next, _ := f.open(t, f.direct, groupName)
	s := open(t, running(t, next), 10)
	publish(t, f.direct, want[6:]...)
	got := receive(t, s, 8)
	for i, d := range got {
		if d.Message().ID != want[i].ID || d.Message().Redelivered != (i < 3) {
			t.Errorf("message %d: %+v", i+1, d.Message())
		}
	}
	running(t, stopped)
	for _, target := range []driver.Target{driver.ToLater, driver.ToTail, driver.ToDead} {
		letter := driver.NewDeadLetter(ds[0].Message(), driver.Failure{Class: driver.ClassDefault}, "test", time.Now())
		if err := stopped.Move(t.Context(), []driver.Move{{Delivery: ds[0], Target: target, DeadLetter: letter}})[0]; !errors.Is(err, driver.ErrStale) {
			t.Errorf("a move of who has lost the lease: %v", err)
		}
	}
	if ds, err := before.Receive(t.Context(), 1); err == nil {
		t.Errorf("who has lost the lease gets %d messages", len(ds))
	}
	noError(t, before.Close(t.Context()))
	noError(t, s.Ack(t.Context(), got, false))
	publish(t, f.direct, event())
	receive(t, s, 1) // the lease is still the next owner's
}

// Entries of a living process are not claimed, although all its idle connections are silent.
func TestHalfOpenRenewal(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "it waits longer than claims take, and a machine that stalls is late to renew")
	for _, ordered := range []bool{false, true} {
		t.Run(fmt.Sprint("ordered ", ordered), func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, ordered)
			publish(t, f.direct, event())
			var idle sync.WaitGroup
			for range 6 {
				idle.Go(func() { _ = f.through.BLPop(t.Context(), time.Second, "nothing").Err() })
			}
			idle.Wait()
			cfg := inboxredis.Config{ConsumerConfig: inbox.ConsumerConfig{Ordered: ordered}}
			receive(t, open(t, running(t, newSource(t, f.through, cfg)), 1), 1)
			other := open(t, running(t, newSource(t, f.direct, cfg)), 1)
			f.network.SilenceConnections()
			ctx, cancel := context.WithTimeout(t.Context(), 15*time.Second)
			defer cancel()
			if ds, err := other.Receive(ctx, 1); len(ds) > 0 || ctx.Err() == nil {
				t.Errorf("%d messages of a living process, %v", len(ds), err)
			}
		})
	}
}

// All keys of a group are in one slot for any names, and names without a slot are rejected.
func TestCluster(t *testing.T) {
	t.Parallel()
	client, servers := redistest.Cluster(t)
	for _, name := range []string{"orders", "{shop}orders", "orders{shop}.1", "o:{a}{b}", "x{}"} {
		keys, err := inboxredis.Keys(name, "billing")
		if (err != nil) != (name == "x{}") {
			t.Errorf("%q: %v", name, err)
		}
		if err != nil {
			continue
		}
		var slots []int64
		for _, k := range keys {
			slots = append(slots, client.ClusterKeySlot(t.Context(), k).Val())
		}
		if slices.Sort(slots); len(slices.Compact(slots)) != 1 {
			t.Errorf("%q: keys in slots %v", name, slots)
		}
	}
	for _, name := range []string{"", "a{b", "a}b", "{a", "{}a{b}"} {
		if _, err := inboxredis.Keys(name, "billing"); err == nil {
			t.Errorf("stream %q is allowed", name)
		}
	}
	t.Run("partitions", func(t *testing.T) { testPartitionsOnCluster(t, client) })
	t.Run("consume", func(t *testing.T) { testOnCluster(t, client, servers) })
}

// Messages are handled, retried and given up while their slot moves to another node.
func testOnCluster(t *testing.T, client *redis.ClusterClient, servers []*testenv.Server) {
	for name, ordered := range map[string]bool{"shared": false, "ordered": true} {
		t.Run(name, func(t *testing.T) {
			if ordered {
				testenv.Nightly(t, "the shared stream moves with every change")
			}
			var mu sync.Mutex
			seen := map[string]int{}
			mux := inbox.NewMux()
			handle(t, mux, event().Name, func(ctx context.Context) error {
				m, _ := inbox.FromContext(ctx)
				mu.Lock()
				defer mu.Unlock()
				if seen[m.ID.String()]++; len(seen)%5 == 0 && m.Replays == 0 {
					return errors.New("broken")
				}
				return nil
			})
			c := newConsumer(t, client, mux, inboxredis.Config{Group: name, ConsumerConfig: inbox.ConsumerConfig{
				Ordered: ordered, Retry: inbox.RetryPolicy{MaxAttempts: 3, BaseDelay: 20 * time.Millisecond},
			}})
			stop := start(t, c)
			defer stop()
			send := func(n int) {
				for range n {
					publish(t, client, event())
				}
			}
			left := func(want int) {
				t.Helper()
				testenv.Eventually(t, func() error {
					pending, err := client.XPending(t.Context(), stream, name).Result()
					if err != nil {
						return err
					}
					mu.Lock()
					defer mu.Unlock()
					if len(seen) < want || pending.Count > 0 {
						return fmt.Errorf("%d of %d messages, %d pending", len(seen), want, pending.Count)
					}
					return nil
				})
			}
			left(0)
			n := int(client.XLen(t.Context(), stream).Val()) // a new group gets the rest of the other group's messages
			send(50)
			left(n + 50)
			move := redistest.NewMove(t, client, servers, stream)
			for _, step := range []func(context.Context) error{move.Begin, move.Keys, move.End} {
				noError(t, step(t.Context()))
				send(10)
			}
			send(50)
			left(n + 130)
			testenv.Eventually(t, func() error { // retries may still be in transit
				if _, err := c.DeadLetters().Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "test"}); err != nil {
					return err
				}
				dead, err := c.DeadLetters().Count(t.Context(), inbox.Filter{})
				if err == nil && dead > 0 {
					err = fmt.Errorf("%d dead letters", dead)
				}
				return err
			})
		})
	}
}

// After a failover a replica accepts claims, and a consumer continues there, although nobody redirects the client.
func TestClusterFailover(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "a replica takes over after seconds")
	client, failOver := redistest.Failover(t)
	p := newProcessor(t, client, inboxredis.ProcessorConfig{Namespace: "failover"}, succeed)
	noError(t, process(t, p, event()))
	handled := make(chan struct{}, 100)
	mux := inbox.NewMux()
	handle(t, mux, event().Name, func(context.Context) error {
		handled <- struct{}{}
		return nil
	})
	defer start(t, newConsumer(t, client, mux, inboxredis.Config{}))()
	publish(t, client, event())
	awaitHandled(t, handled)
	publish(t, failOver(), event())
	awaitHandled(t, handled)
	testenv.Eventually(t, func() error { return process(t, p, event()) })
}

// The run of two consumers with ParkKeys is one of the model of parked keys.
func TestParkKeys_runOfTheModel(t *testing.T) {
	t.Parallel()
	parked.Test(t, newFixture(t, true).source(), parked.OnPostgres(t))
}
