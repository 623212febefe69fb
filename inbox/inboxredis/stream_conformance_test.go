package inboxredis_test

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/internal/partition"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	outbox "github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxredis"
)

const stream = "orders"

// The suites run whole on a shared stream. Of the others run the subtests that depend on the kind of queue.
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

func (f *fixture) open(t *testing.T, client redis.UniversalClient, group string) (driver.Source, driver.Letters) {
	t.Helper()
	s, l, err := inboxredis.NewSource(client, stream, inboxredis.Config{Group: group, Partitions: f.partitions, ConsumerConfig: inbox.ConsumerConfig{
		Name: groupName, Ordered: f.ordered, Classes: []string{conformance.OwnClass}, Logger: slog.New(slog.DiscardHandler),
	}})
	noError(t, err)
	return s, l
}

// source is what the suites use.
func (f *fixture) source() conformance.SourceFixture {
	return conformance.SourceFixture{
		New: func(t *testing.T) driver.Source {
			s, _ := f.open(t, f.through, groupName)
			return s
		},
		Letters: func(t *testing.T) driver.Letters {
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

// publish puts messages into the stream as a relay does.
func publish(t *testing.T, client redis.UniversalClient, msgs ...*inbox.Message) {
	t.Helper()
	publishTo(t, client, 1, msgs...)
}

// publishTo puts messages into so many partitions.
func publishTo(t *testing.T, client redis.UniversalClient, partitions int, msgs ...*inbox.Message) {
	t.Helper()
	p, err := outboxredis.NewPublisher(client, outboxredis.Config{Stream: stream, Partitions: map[string]int{stream: partitions}})
	noError(t, err)
	var all sync.WaitGroup
	errs := make([]error, len(msgs))
	for i, m := range msgs {
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

// open begins a session with a window. It is not closed: that is the test's.
func open(t *testing.T, source driver.Source, window int) driver.Session {
	t.Helper()
	s, err := source.Open(t.Context())
	noError(t, err)
	noError(t, s.Start(t.Context(), window))
	return s
}

// receive takes so many messages.
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

// running has a source at work until the test ends.
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
	s, _, err := inboxredis.NewSource(client, stream, cfg)
	noError(t, err)
	return s
}

// The tests wait for servers that are silent more than they compute, so eight run at once.
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
