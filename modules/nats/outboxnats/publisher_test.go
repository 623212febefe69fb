package outboxnats_test

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/holdfast-go/holdfast/internal/partition"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/modules/nats/internal/form"
	"github.com/holdfast-go/holdfast/modules/nats/internal/natstest"
	"github.com/holdfast-go/holdfast/modules/nats/outboxnats"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/format"
	"github.com/holdfast-go/holdfast/outbox/outboxtest/conformance"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func TestConformance(t *testing.T) {
	t.Parallel()
	testenv.NATSURL(t) // skips before there are subtests
	conformance.TestPublisher(t, conformance.PublisherBackend{Open: func(t *testing.T) conformance.PublisherCase {
		url := testenv.NATSURL(t)
		proxy := testenv.NewProxy(t, url)
		direct := natstest.Connect(t, url)
		topic := natstest.Name(t, direct)
		stream := create(t, direct, topic)
		return conformance.PublisherCase{
			Publisher:  newPublisher(t, natstest.Connect(t, proxy.URL()), outboxnats.Config{Topic: topic, Timeout: 10 * time.Second}),
			Received:   func(ctx context.Context) ([]driver.Message, error) { return received(ctx, stream) },
			Unroutable: driver.Message{ID: uuid.Must(uuid.NewV7()), Name: "lost", Body: []byte("1"), Exchange: topic + "-nowhere"},
			Break:      proxy.Cut,
			Fix:        proxy.Heal,
		}
	}})
}

func newPublisher(t *testing.T, conn *nats.Conn, cfg outboxnats.Config) *outboxnats.Publisher {
	t.Helper()
	testenv.Eventually(t, func() error {
		if !conn.IsConnected() {
			return nats.ErrDisconnected
		}
		return nil
	})
	p, err := outboxnats.NewPublisher(conn, cfg)
	must(t, err)
	return p
}

// create creates a stream that takes a topic.
func create(t *testing.T, conn *nats.Conn, topic string, edit ...func(*jetstream.StreamConfig)) jetstream.Stream {
	t.Helper()
	cfg := jetstream.StreamConfig{Name: topic, Subjects: []string{topic + ".>"}}
	for _, f := range edit {
		f(&cfg)
	}
	stream, err := natstest.JetStream(t, conn).CreateStream(t.Context(), cfg)
	must(t, err)
	return stream
}

func received(ctx context.Context, stream jetstream.Stream) (all []driver.Message, err error) {
	info, err := stream.Info(ctx)
	if err != nil {
		return nil, err
	}
	for seq := info.State.FirstSeq; seq > 0 && seq <= info.State.LastSeq; seq++ {
		raw, err := stream.GetMsg(ctx, seq)
		if err != nil {
			return nil, err
		}
		headers := form.Decode(raw.Header)
		m := driver.Message{Name: headers[form.Name], ContentType: headers[form.ContentType], Headers: headers, Body: raw.Data}
		if m.ID, err = uuid.Parse(headers[form.ID]); err != nil {
			return nil, err
		}
		if m.ContentType == "" {
			m.ContentType = "application/json"
		}
		all = append(all, m)
	}
	return all, nil
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// publish returns the outcome of one message.
func publish(t *testing.T, p *outboxnats.Publisher, m driver.Message) error {
	t.Helper()
	outcome := make(chan error, 1)
	p.Publish(t.Context(), m, func(err error) { outcome <- err })
	return <-outcome
}

// A second copy, as from a relay that died before it recorded the first, is confirmed and not stored.
func TestPublish_dropsSecondCopies(t *testing.T) {
	t.Parallel()
	conn := natstest.New(t)
	topic := natstest.Name(t, conn)
	stream := create(t, conn, topic)
	p := newPublisher(t, conn, outboxnats.Config{Topic: topic})
	m := conformance.NewMessage(t, "order.placed", 1)
	must(t, publish(t, p, m))
	must(t, publish(t, p, m))
	if all, err := received(t.Context(), stream); err != nil || len(all) != 1 {
		t.Errorf("the stream has %d messages, %v", len(all), err)
	}
}

func TestPublish_classes(t *testing.T) {
	t.Parallel()
	conn := natstest.New(t)
	topic := natstest.Name(t, conn)
	create(t, conn, topic, func(c *jetstream.StreamConfig) { c.MaxMsgSize, c.MaxMsgs, c.Discard = 1000, 1, jetstream.DiscardNew })
	p := newPublisher(t, conn, outboxnats.Config{Topic: topic})
	must(t, publish(t, p, conformance.NewMessage(t, "order.placed", 1)))
	large := conformance.NewMessage(t, "order.placed", strings.Repeat("x", 2000))
	huge := conformance.NewMessage(t, "order.placed", 1)
	huge.Body = make([]byte, conn.MaxPayload()+1)
	wild := conformance.NewMessage(t, "order.placed", 1)
	wild.RoutingKey = "order.*"
	elsewhere := conformance.NewMessage(t, "order.placed", 1)
	elsewhere.Exchange = topic + "-nowhere"
	for name, tc := range map[string]struct {
		m    driver.Message
		want driver.Class
	}{
		"over the stream's limit": {large, driver.Permanent},
		"over max_payload":        {huge, driver.Permanent},
		"no subject":              {wild, driver.Permanent},
		"no stream":               {elsewhere, driver.Unroutable},
		"stream is full":          {conformance.NewMessage(t, "order.placed", 2), driver.Retryable},
	} {
		if err := publish(t, p, tc.m); err == nil || driver.ClassOf(err) != tc.want {
			t.Errorf("%s: %v, want class %s", name, err, tc.want)
		}
	}
}

// A user without the right to publish a subject gets no answer: the message is unroutable, and others succeed.
func TestPublish_withoutPermission(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.NATS, `authorization { users: [
		{user: admin, password: a}
		{user: shop, password: s, permissions: {publish: {allow: ["$JS.>", "shop.order.>"]}}} ] }`, "no_auth_user: admin")
	admin := natstest.Connect(t, strings.Replace(server.URL(), "//", "//admin:a@", 1))
	create(t, admin, "shop")
	shop := natstest.Connect(t, strings.Replace(server.URL(), "//", "//shop:s@", 1))
	p := newPublisher(t, shop, outboxnats.Config{Topic: "shop", Timeout: 2 * time.Second})
	if err := publish(t, p, conformance.NewMessage(t, "secret.told", 1)); driver.ClassOf(err) != driver.Unroutable || !errors.Is(err, nats.ErrPermissionViolation) {
		t.Errorf("denied: %v", err)
	}
	must(t, publish(t, p, conformance.NewMessage(t, "order.placed", 1)))
}

// The publisher asks which stream takes a subject, and gets no answer. The outcome comes when nobody waits for it any more.
func TestPublish_contextEndsWhileItAsks(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.NATS, `authorization { users: [
		{user: admin, password: a}
		{user: shop, password: s, permissions: {publish: {allow: "shop.>"}}} ] }`, "no_auth_user: admin")
	relay, asked := natstest.Connect(t, strings.Replace(server.URL(), "//", "//shop:s@", 1)), make(chan struct{})
	relay.SetErrorHandler(func(*nats.Conn, *nats.Subscription, error) { close(asked) })
	p := newPublisher(t, relay, outboxnats.Config{Topic: "shop", Timeout: 2 * testenv.Patience})
	ctx, cancel := context.WithCancel(t.Context())
	outcome := make(chan error, 1)
	p.Publish(ctx, conformance.NewMessage(t, "order.placed", 1), func(err error) { outcome <- err })
	<-asked
	cancel()
	select {
	case err := <-outcome:
		if driver.ClassOf(err) != driver.Unavailable {
			t.Error(err)
		}
	case <-time.After(testenv.Patience):
		t.Error("no outcome after the end of the context")
	}
}

// A user with the documented rights publishes and checks.
func TestRights(t *testing.T) {
	t.Parallel()
	connect := natstest.ReadRights(t).Limited(t, map[string][]string{"relay": {"Publish", "Ready", "Check"}})
	create(t, connect("admin"), "shop")
	p := newPublisher(t, connect("relay"), outboxnats.Config{Topic: "shop"})
	must(t, p.Ready(t.Context()))
	must(t, p.Check(t.Context()))
	must(t, publish(t, p, conformance.NewMessage(t, "order.placed", 1)))
}

func TestPublish_subjectAndHeaders(t *testing.T) {
	t.Parallel()
	conn := natstest.New(t)
	topic := natstest.Name(t, conn)
	stream := create(t, conn, topic)
	p := newPublisher(t, conn, outboxnats.Config{
		Topic: topic, Partitions: map[string]int{topic + ".split": 4}, Format: format.CloudEvents{Source: "/shop"},
		Routes: map[string]outbox.Route{"order.placed": {Exchange: topic + ".split", Headers: map[string]string{"h": "v"}}},
	})
	m := conformance.NewMessage(t, "order.placed", 1)
	m.Key, m.Headers = "customer-7", map[string]string{"tenant": "t"}
	packed := []string{"a:b", "Nats-Rollup", `X-Message-Stamp-App\MessageIdStamp`, "a b", "a/b", "ü", "", "a\nb", "Status"}
	for _, name := range packed {
		m.Headers[name] = "c"
	}
	must(t, publish(t, p, m))
	raw, err := stream.GetMsg(t.Context(), 1)
	must(t, err)
	if want := partition.Name(topic+".split", partition.Of("customer-7", "", 4)) + ".order.placed"; raw.Subject != want {
		t.Errorf("subject %s, want %s", raw.Subject, want)
	}
	for name, want := range map[string]string{
		"Nats-Msg-Id": m.ID.String(), "holdfast-name": "order.placed", "holdfast-key": "customer-7", "h": "v", "tenant": "t",
		"ce-type": "order.placed", "ce-partitionkey": "customer-7", "Nats-Rollup": "",
	} {
		if got := raw.Header.Get(name); got != want {
			t.Errorf("header %s is %q, want %q", name, got, want)
		}
	}
	all := form.Decode(raw.Header)
	for _, name := range packed {
		if all[name] != "c" {
			t.Errorf("header %q is decoded as %q", name, all[name])
		}
	}
}

func TestCheck(t *testing.T) {
	t.Parallel()
	conn := natstest.New(t)
	topic := natstest.Name(t, conn)
	p := newPublisher(t, conn, outboxnats.Config{Topic: topic, Partitions: map[string]int{topic: 2}})
	if err := p.Check(t.Context()); err == nil || strings.Count(err.Error(), "no stream takes") != 2 {
		t.Errorf("without a stream: %v", err)
	}
	stream := create(t, conn, topic, func(c *jetstream.StreamConfig) {
		c.Storage, c.Duplicates, c.Retention = jetstream.MemoryStorage, time.Second, jetstream.InterestPolicy
	})
	err := p.Check(t.Context())
	for _, want := range []string{"when the server ends", "for 1s only", "it has no consumer"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("with a stream in memory: %v does not say %q", err, want)
		}
	}
	_, err = stream.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: "billing", AckPolicy: jetstream.AckExplicitPolicy})
	must(t, err)
	if err := p.Check(t.Context()); strings.Contains(err.Error(), "it has no consumer") {
		t.Errorf("with a consumer: %v", err)
	}
	must(t, p.Ready(t.Context()))
}

func TestNewPublisher_namesAllViolations(t *testing.T) {
	t.Parallel()
	_, err := outboxnats.NewPublisher(nil, outboxnats.Config{
		Topic: "a..b", Partitions: map[string]int{"x": 65}, Format: format.CloudEvents{}, Timeout: -1,
	})
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{"conn is nil", "a..b", "Partitions", "Format", "Timeout"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not name %s", err, want)
		}
	}
}
