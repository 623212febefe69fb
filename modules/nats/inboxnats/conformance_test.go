package inboxnats_test

import (
	"flag"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/internal/partition"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/trace/parked"
	"github.com/holdfast-go/holdfast/internal/wire"
	"github.com/holdfast-go/holdfast/modules/nats/inboxnats"
	"github.com/holdfast-go/holdfast/modules/nats/internal/form"
	"github.com/holdfast-go/holdfast/modules/nats/internal/natstest"
	"github.com/holdfast-go/holdfast/modules/nats/outboxnats"
	outbox "github.com/holdfast-go/holdfast/outbox/driver"
)

// The tests mostly wait for silent servers, so eight run at once.
func TestMain(m *testing.M) {
	if err := flag.Set("test.parallel", "8"); err != nil {
		panic(err)
	}
	os.Exit(testenv.Run(m))
}

// runsOf runs whole suites on a shared stream. On other queues it runs the subtests that depend on the kind of queue.
func runsOf(kind string) conformance.Runs {
	return conformance.Runs{Nightly: testenv.Nightly, Variant: kind != "shared"}
}

func TestSource(t *testing.T) {
	t.Parallel()
	testenv.NATSURL(t) // skips before there are subtests
	for name, ordered := range map[string]bool{"shared": false, "ordered": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conformance.TestSource(t, conformance.SourceBackend{Runs: runsOf(name), New: func(t *testing.T) conformance.SourceFixture {
				return newFixture(t, ordered, 1).source()
			}})
		})
	}
}

func TestConsumer(t *testing.T) {
	t.Parallel()
	testenv.NATSURL(t)
	for name, ordered := range map[string]bool{"shared": false, "ordered": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conformance.TestConsumer(t, conformance.ConsumerBackend{Runs: runsOf(name), Ordered: ordered, New: func(t *testing.T) conformance.ConsumerFixture {
				return newFixture(t, ordered, 1).consumer()
			}})
		})
	}
}

func TestPartitions(t *testing.T) {
	t.Parallel()
	var accounts strings.Builder // the suite wants one name for all queues
	const most = 16
	for i := range most {
		fmt.Fprintf(&accounts, "a%d: {jetstream: enabled, users: [{user: a%d, password: a}]}\n", i, i)
	}
	server := testenv.Private(t, testenv.NATS, "accounts {", accounts.String(), "}", `no_auth_user: "a0"`)
	var taken atomic.Int64
	conformance.TestPartitions(t, conformance.PartitionsBackend{
		Runs: runsOf("shared"),
		New: func(t *testing.T) conformance.ConsumerFixture {
			url := strings.Replace(server.URL(), "//", fmt.Sprintf("//a%d:a@", taken.Add(1)%most), 1)
			return fixtureOn(t, url, "orders", true, conformance.Partitions).consumer()
		},
		Of: func(m *inbox.Message) int { return partition.Of(m.Key, m.ID.String(), conformance.Partitions) },
	})
}

// billing is the name of the consumers.
const billing = "billing"

// fixture is a stream with a consumer.
type fixture struct {
	stream          inboxnats.Stream
	ordered         bool
	network         *testenv.Proxy
	direct, through *nats.Conn // through the network
}

func newFixture(t *testing.T, ordered bool, partitions int) *fixture {
	t.Helper()
	url := testenv.NATSURL(t)
	return fixtureOn(t, url, natstest.Name(t, natstest.Connect(t, url)), ordered, partitions)
}

func fixtureOn(t *testing.T, url, name string, ordered bool, partitions int) *fixture {
	t.Helper()
	proxy := testenv.NewProxy(t, url)
	f := &fixture{
		ordered: ordered, network: proxy, direct: natstest.Connect(t, url), through: natstest.Connect(t, proxy.URL()),
		stream: inboxnats.Stream{Name: name, Partitions: partitions},
	}
	f.setup(t, billing)
	return f
}

func (f *fixture) config(name string) inbox.ConsumerConfig {
	return inbox.ConsumerConfig{Name: name, Ordered: f.ordered, Classes: []string{conformance.OwnClass}, Logger: slog.New(slog.DiscardHandler)}
}

func (f *fixture) setup(t *testing.T, name string) {
	t.Helper()
	patient := f.stream
	patient.Timeout = testenv.Patience
	c, err := inboxnats.NewConsumer(f.direct, patient, inbox.NewMux(), f.config(name))
	noError(t, err)
	noError(t, c.Setup(t.Context()))
}

func (f *fixture) parts(t *testing.T, conn *nats.Conn, name string) ([]driver.Source, driver.DeadLetters) {
	t.Helper()
	all, letters, err := inboxnats.NewSources(conn, f.stream, f.config(name))
	noError(t, err)
	return all, letters
}

// source returns the fixture of the suites.
func (f *fixture) source() conformance.SourceFixture {
	own := f.stream.Name + "=" + billing + "="
	return conformance.SourceFixture{
		New: func(t *testing.T) driver.Source {
			all, _ := f.parts(t, f.through, billing)
			return all[0]
		},
		NoRetrying: true, // the server cannot list delayed messages
		DeadLetters: func(t *testing.T) driver.DeadLetters {
			_, letters := f.parts(t, f.direct, billing)
			return letters
		},
		Publish: func(t *testing.T, msgs ...*inbox.Message) { f.publish(t, msgs...) },
		Network: f.network,
		Delete: func(t *testing.T) func() {
			js := natstest.JetStream(t, f.direct)
			noError(t, js.DeleteStream(t.Context(), f.stream.Name))
			return func() { f.setup(t, billing) }
		},
		Refuse: func(t *testing.T, class string) func() {
			// The stream of the dead letters accepts only class default.
			js := natstest.JetStream(t, f.direct)
			s, err := js.Stream(t.Context(), own+"dead")
			noError(t, err)
			was := s.CachedInfo().Config
			narrow := was
			narrow.Subjects = []string{"holdfast." + f.stream.Name + "." + billing + ".dead.all.failed_default"}
			if class == driver.ClassDefault {
				narrow.Subjects[0] = "holdfast.nothing." + f.stream.Name
			}
			_, err = js.UpdateStream(t.Context(), narrow)
			noError(t, err)
			return func() {
				_, err := js.UpdateStream(t.Context(), was)
				noError(t, err)
			}
		},
		Another: func(t *testing.T) driver.Source {
			f.setup(t, "mailing")
			all, _ := f.parts(t, f.direct, "mailing")
			return all[0]
		},
	}
}

func (f *fixture) consumer() conformance.ConsumerFixture {
	return conformance.ConsumerFixture{
		SourceFixture: f.source(),
		Parts: func(t *testing.T) []driver.Source {
			all, _ := f.parts(t, f.through, billing)
			return all
		},
		Consumer: func(t *testing.T, p inbox.Processor, cfg conformance.ConsumerConfig) conformance.Consumer {
			own := cfg.ConsumerConfig
			own.Name, own.Classes = billing, []string{conformance.OwnClass}
			leveling := time.Duration(0)
			if f.stream.Partitions > 1 {
				leveling = time.Second
			}
			c, err := inboxnats.NewTuned(f.through, f.stream, p, own, cfg.MaxBodyBytes, leveling)
			noError(t, err)
			return c
		},
	}
}

// publish puts messages into the stream as a relay does.
func (f *fixture) publish(t testing.TB, msgs ...*inbox.Message) {
	t.Helper()
	p, err := outboxnats.NewPublisher(f.direct, outboxnats.Config{
		Topic: f.stream.Name, Partitions: map[string]int{f.stream.Name: f.stream.Partitions}, Timeout: testenv.Patience,
	})
	noError(t, err)
	var all sync.WaitGroup
	errs := make([]error, len(msgs))
	for i, m := range msgs {
		if m.ID == uuid.Nil || m.Name == "" { // no relay sends it
			_, errs[i] = natstest.JetStream(t, f.direct).PublishMsg(t.Context(), &nats.Msg{
				Subject: f.stream.Name + ".foreign", Data: m.Body, Header: nats.Header{"holdfast-name": {m.Name}, "holdfast-id": {m.ID.String()}},
			})
			continue
		}
		if m.ContentEncoding+m.CorrelationID+m.ReplyTo != "" { // headers that only other senders write
			_, errs[i] = natstest.JetStream(t, f.direct).PublishMsg(t.Context(), f.foreign(m))
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
	noError(t, errs...)
}

// foreign encodes a message as another sender would.
func (f *fixture) foreign(m *inbox.Message) *nats.Msg {
	topic, id := f.stream.Name, m.ID.String()
	if n := f.stream.Partitions; n > 1 {
		topic = partition.Name(topic, partition.Of(m.Key, id, n))
	}
	all := map[string]string{
		form.ID: id, form.Name: m.Name, form.ContentType: m.ContentType, form.CreatedAt: m.PublishedAt.UTC().Format(time.RFC3339Nano),
		form.ContentEncoding: m.ContentEncoding, form.CorrelationID: m.CorrelationID, form.ReplyTo: m.ReplyTo, wire.HeaderKey: m.Key,
	}
	maps.Copy(all, m.Headers)
	return &nats.Msg{Subject: topic + "." + m.Name, Data: m.Body, Header: form.Encode(all)}
}

func noError(t testing.TB, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}

// The run of two consumers with ParkKeys is one of the model of parked keys.
func TestParkKeys_runOfTheModel(t *testing.T) {
	t.Parallel()
	parked.Test(t, newFixture(t, true, 1).source(), parked.OnPostgres(t))
}
