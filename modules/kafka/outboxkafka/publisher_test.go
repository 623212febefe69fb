package outboxkafka_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/sasl/plain"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/modules/kafka/internal/kafkatest"
	"github.com/holdfast-go/holdfast/modules/kafka/outboxkafka"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/format"
	"github.com/holdfast-go/holdfast/outbox/outboxtest/conformance"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func TestConformance(t *testing.T) {
	t.Parallel()
	conformance.TestPublisher(t, conformance.PublisherBackend{Open: func(t *testing.T) conformance.PublisherCase {
		brokers := kafkatest.Brokers(t)
		topic := kafkatest.Topic(t, brokers)
		reader := kafkatest.NewReader(t, brokers, topic)
		line := &kafkatest.Line{}
		return conformance.PublisherCase{
			Publisher: newPublisher(t, kafkatest.Client(t, brokers, kgo.Dialer(line.Dial)), outboxkafka.Config{Topic: topic}),
			Received: func(ctx context.Context) ([]driver.Message, error) {
				return received(reader.Records(ctx))
			},
			Unroutable: driver.Message{ID: uuid.Must(uuid.NewV7()), Name: "lost", Body: []byte("1"), Exchange: topic + "-nowhere"},
			Break:      line.Cut,
			Fix:        line.Heal,
		}
	}})
}

func newPublisher(t *testing.T, client *kgo.Client, cfg outboxkafka.Config) *outboxkafka.Publisher {
	t.Helper()
	p, err := outboxkafka.NewPublisher(client, cfg)
	must(t, err)
	return p
}

// received returns records as messages.
func received(records []*kgo.Record) (all []driver.Message, err error) {
	for _, r := range records {
		m := driver.Message{Key: string(r.Key), Body: r.Value, ContentType: "application/json", Headers: map[string]string{}}
		for _, h := range r.Headers {
			m.Headers[h.Key] = string(h.Value)
		}
		m.Name = m.Headers["holdfast-name"]
		if media, ok := m.Headers["content-type"]; ok {
			m.ContentType = media
		}
		if m.ID, err = uuid.Parse(m.Headers["holdfast-id"]); err != nil {
			return nil, err
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

// start returns where the outcome of one message will come.
func start(ctx context.Context, p *outboxkafka.Publisher, m driver.Message) <-chan error {
	outcome := make(chan error, 1)
	p.Publish(ctx, m, func(err error) { outcome <- err })
	return outcome
}

// publish returns the outcome of one message.
func publish(t *testing.T, p *outboxkafka.Publisher, m driver.Message) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
	defer cancel()
	return <-start(ctx, p, m)
}

func TestPublish_keyAndHeaders(t *testing.T) {
	t.Parallel()
	brokers := kafkatest.Brokers(t)
	topic := kafkatest.Topic(t, brokers)
	p := newPublisher(t, kafkatest.Client(t, brokers), outboxkafka.Config{
		Topic: topic, Routes: map[string]outbox.Route{"order.placed": {Headers: map[string]string{"h": "route"}}},
	})
	m := conformance.NewMessage(t, "order.placed", 1)
	m.Key, m.CreatedAt = "customer-7", time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	m.Headers = map[string]string{"a:b": " c\n", "h": "own", "content-type": "text/plain", "holdfast-attempt": "9", "empty": ""}
	before := time.Now()
	must(t, publish(t, p, m))
	bare := conformance.NewMessage(t, "order.placed", 2)
	bare.Body = nil
	must(t, publish(t, p, bare))
	records := arrived(t, kafkatest.NewReader(t, brokers, topic), 2)
	r := records[m.ID.String()]
	if string(r.Key) != "customer-7" || r.Timestamp.Before(before.Truncate(time.Millisecond)) {
		t.Errorf("key %q, time stamp %v", r.Key, r.Timestamp)
	}
	for name, want := range map[string]string{
		"holdfast-id": m.ID.String(), "holdfast-name": "order.placed", "holdfast-created-at": "2026-01-02T03:04:05Z",
		"a:b": " c\n", "h": "route", "empty": "",
	} {
		if got, ok := kafkatest.Header(r, name); !ok || got != want {
			t.Errorf("header %s is %q, %v, want %q", name, got, ok, want)
		}
	}
	for _, name := range []string{"content-type", "holdfast-attempt", "holdfast-key"} {
		if got, ok := kafkatest.Header(r, name); ok {
			t.Errorf("header %s is %q, want none", name, got)
		}
	}
	if other := records[bare.ID.String()]; other.Key != nil || other.Value == nil {
		t.Errorf("without key and body: key %q, value %v, want no key and no tombstone", other.Key, other.Value)
	}
}

// arrived waits for n records and returns them by their id.
func arrived(t *testing.T, reader *kafkatest.Reader, n int) map[string]*kgo.Record {
	t.Helper()
	all := map[string]*kgo.Record{}
	testenv.Eventually(t, func() error {
		for _, r := range reader.Records(t.Context()) {
			id, _ := kafkatest.Header(r, "holdfast-id")
			all[id] = r
		}
		if len(all) < n {
			return fmt.Errorf("%d records, want %d", len(all), n)
		}
		return nil
	})
	return all
}

func TestPublish_cloudEvents(t *testing.T) {
	t.Parallel()
	brokers := kafkatest.Brokers(t)
	for name, structured := range map[string]bool{"binary": false, "structured": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			topic := kafkatest.Topic(t, brokers)
			p := newPublisher(t, kafkatest.Client(t, brokers), outboxkafka.Config{
				Topic: topic, Format: format.CloudEvents{Source: "/shop", Structured: structured},
			})
			m := conformance.NewMessage(t, "order.placed", 1)
			m.Key, m.Headers = "k", map[string]string{"cloudEvents:subject": "A-1", "tenant": "t"}
			must(t, publish(t, p, m))
			r := arrived(t, kafkatest.NewReader(t, brokers, topic), 1)[m.ID.String()]
			want := map[string]string{
				"content-type": "application/json", "ce_specversion": "1.0", "ce_id": m.ID.String(), "ce_source": "/shop",
				"ce_type": "order.placed", "ce_partitionkey": "k", "ce_subject": "A-1", "tenant": "t",
			}
			if structured {
				want = map[string]string{"content-type": "application/cloudevents+json; charset=utf-8", "tenant": "t"}
				if body := string(r.Value); !strings.Contains(body, `"subject":"A-1"`) || !strings.Contains(body, `"data":1`) {
					t.Errorf("body %s", body)
				}
			}
			for name, value := range want {
				if got, _ := kafkatest.Header(r, name); got != value {
					t.Errorf("header %s is %q, want %q", name, got, value)
				}
			}
			_, attribute := kafkatest.Header(r, "ce_id")
			if _, plain := kafkatest.Header(r, "cloudEvents:subject"); plain || attribute == structured {
				t.Errorf("headers %v", r.Headers)
			}
		})
	}
}

func TestPublish_classes(t *testing.T) {
	t.Parallel()
	cluster := kafkatest.Fake(t, kfake.SeedTopics(1, "shop"), kfake.SeedTopics(1, "broken"), kfake.SeedTopics(1, "denied"))
	cluster.Fault(
		kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "broken", Err: kerr.UnknownServerError, Count: -1},
		kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "denied", Err: kerr.TopicAuthorizationFailed, Count: -1},
	)
	p := newPublisher(t, kafkatest.Client(t, cluster.ListenAddrs()), outboxkafka.Config{Topic: "shop"})
	for name, tc := range map[string]struct {
		topic string
		body  int
		want  driver.Class
	}{
		"over the client's limit": {"shop", 1 << 20, driver.Permanent},
		"no name of a topic":      {"a b", 1, driver.Permanent},
		"unknown topic":           {"nowhere", 1, driver.Unroutable},
		"no permission":           {"denied", 1, driver.Unroutable},
		"error without a class":   {"broken", 1, driver.Retryable},
	} {
		m := conformance.NewMessage(t, "order.placed", strings.Repeat("x", tc.body))
		m.Exchange = tc.topic
		if err := publish(t, p, m); err == nil || driver.ClassOf(err) != tc.want {
			t.Errorf("%s: %v, want class %s", name, err, tc.want)
		}
	}
	must(t, publish(t, p, conformance.NewMessage(t, "order.placed", 1)))
}

// A broker rejects a whole batch because of one record. The other messages of the batch are published.
func TestPublish_onlyTheLargeMessageFails(t *testing.T) {
	t.Parallel()
	cluster := kafkatest.Fake(t, kfake.SeedTopics(1, "shop"), kfake.BrokerConfigs(map[string]string{"message.max.bytes": "20000"}))
	client := kafkatest.Client(t, cluster.ListenAddrs(), kgo.ProducerBatchCompression(kgo.NoCompression()), kgo.ProducerLinger(50*time.Millisecond))
	p := newPublisher(t, client, outboxkafka.Config{Topic: "shop"})
	outcomes := make([]<-chan error, 50)
	for i := range outcomes {
		size := 1000 // all together are too large as well
		if i == 20 {
			size = 30_000
		}
		outcomes[i] = start(t.Context(), p, conformance.NewMessage(t, "order.placed", strings.Repeat("x", size)))
	}
	for i, outcome := range outcomes {
		err := <-outcome
		if i == 20 && driver.ClassOf(err) != driver.Permanent {
			t.Errorf("large: %v, want class permanent", err)
		}
		if i != 20 && err != nil {
			t.Errorf("message %d: %v", i, err)
		}
	}
	testenv.Eventually(t, func() error {
		if used, _ := p.Window(); used != 0 {
			return fmt.Errorf("%d places of the window are still used", used)
		}
		return nil
	})
}

// The client retries on the new leader; the answer comes late and is a confirm.
func TestPublish_leaderMoves(t *testing.T) {
	t.Parallel()
	cluster := kafkatest.Fake(t, kfake.NumBrokers(2), kfake.SeedTopics(1, "shop"))
	moved := cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "shop", Err: kerr.NotLeaderForPartition, Count: 3})
	p := newPublisher(t, kafkatest.Client(t, cluster.ListenAddrs()), outboxkafka.Config{Topic: "shop"})
	must(t, publish(t, p, conformance.NewMessage(t, "order.placed", 1)))
	if moved.Hits() != 3 {
		t.Errorf("the broker rejected %d requests, want 3", moved.Hits())
	}
	must(t, cluster.MoveTopicPartition("shop", 0, 1-cluster.LeaderFor("shop", 0)))
	must(t, publish(t, p, conformance.NewMessage(t, "order.placed", 2)))
}

// A lost reply does not double a record: the producer is idempotent.
func TestPublish_lostReply(t *testing.T) {
	t.Parallel()
	cluster := kafkatest.Fake(t, kfake.SeedTopics(1, "shop"))
	cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "shop", Err: kerr.RequestTimedOut, Count: 2}) // stored, then this answer
	p := newPublisher(t, kafkatest.Client(t, cluster.ListenAddrs()), outboxkafka.Config{Topic: "shop"})
	must(t, publish(t, p, conformance.NewMessage(t, "order.placed", 1)))
	if n := cluster.PartitionInfo("shop", 0).HighWatermark; n != 1 {
		t.Errorf("the topic has %d records, want 1", n)
	}
}

// While too few replicas are in sync, a message waits as long as its context and does not cost an attempt. The client
// drops it then.
func TestPublish_contextEnds(t *testing.T) {
	t.Parallel()
	cluster := kafkatest.Fake(t, kfake.SeedTopics(1, "shop"))
	few := cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "shop", Err: kerr.NotEnoughReplicas, Count: -1})
	client := kafkatest.Client(t, cluster.ListenAddrs())
	p := newPublisher(t, client, outboxkafka.Config{Topic: "shop"})
	ctx, cancel := context.WithCancel(t.Context())
	outcome := start(ctx, p, conformance.NewMessage(t, "order.placed", 1))
	must(t, few.Wait(t.Context(), 2))
	cancel()
	if err := <-outcome; driver.ClassOf(err) != driver.Unavailable || !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want class unavailable", err)
	}
	testenv.Eventually(t, func() error {
		if n := client.BufferedProduceRecords(); n > 0 {
			return fmt.Errorf("the client has %d records", n)
		}
		return nil
	})
	few.Remove()
	must(t, publish(t, p, conformance.NewMessage(t, "order.placed", 2)))
	if n := cluster.PartitionInfo("shop", 0).HighWatermark; n != 1 {
		t.Errorf("the topic has %d records, want 1", n)
	}
}

func TestPublish_authenticationFails(t *testing.T) {
	t.Parallel()
	cluster := kafkatest.Fake(t, kfake.SeedTopics(1, "shop"), kfake.EnableSASL(), kfake.Superuser("PLAIN", "shop", "p"))
	wrong := cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.SASLAuthenticate}, TopLevel: true, Err: kerr.SaslAuthenticationFailed, Count: -1})
	client := kafkatest.Client(t, cluster.ListenAddrs(), kgo.SASL(plain.Auth{User: "shop", Pass: "p"}.AsMechanism()))
	p := newPublisher(t, client, outboxkafka.Config{Topic: "shop"})
	ctx, cancel := context.WithCancel(t.Context())
	outcome := start(ctx, p, conformance.NewMessage(t, "order.placed", 1))
	must(t, wrong.Wait(t.Context(), 2)) // the client tries again
	cancel()
	if err := <-outcome; driver.ClassOf(err) != driver.Unavailable {
		t.Errorf("%v, want class unavailable", err)
	}
	if err := p.Ready(t.Context()); !errors.Is(err, kerr.SaslAuthenticationFailed) {
		t.Errorf("ready: %v", err)
	}
	wrong.Remove()
	must(t, publish(t, p, conformance.NewMessage(t, "order.placed", 1)))
}

// A user without the right to write a topic: its messages are unroutable, and others pass.
func TestPublish_withoutPermission(t *testing.T) {
	t.Parallel()
	cluster := kafkatest.Fake(t, kfake.SeedTopics(1, "shop"), kfake.SeedTopics(1, "secret"), kfake.EnableSASL(), kfake.EnableACLs(),
		kfake.User("PLAIN", "shop", "p",
			kfake.ACL{Resource: kmsg.ACLResourceTypeTopic, Name: "shop", Pattern: kmsg.ACLResourcePatternTypeLiteral, Operation: kmsg.ACLOperationWrite, Allow: true},
			kfake.ACL{Resource: kmsg.ACLResourceTypeCluster, Name: "kafka-cluster", Pattern: kmsg.ACLResourcePatternTypeLiteral, Operation: kmsg.ACLOperationIdempotentWrite, Allow: true}))
	client := kafkatest.Client(t, cluster.ListenAddrs(), kgo.SASL(plain.Auth{User: "shop", Pass: "p"}.AsMechanism()))
	p := newPublisher(t, client, outboxkafka.Config{Topic: "shop"})
	must(t, publish(t, p, conformance.NewMessage(t, "order.placed", 1)))
	hidden := conformance.NewMessage(t, "order.placed", 2)
	hidden.Exchange = "secret"
	if err := publish(t, p, hidden); driver.ClassOf(err) != driver.Unroutable {
		t.Errorf("%v, want class unroutable", err)
	}
	must(t, publish(t, p, conformance.NewMessage(t, "order.placed", 3)))
}

func TestCheck(t *testing.T) {
	t.Parallel()
	cluster := kafkatest.Fake(t, kfake.NumBrokers(3), kfake.SeedTopics(1, "shop"))
	p := newPublisher(t, kafkatest.Client(t, cluster.ListenAddrs()), outboxkafka.Config{
		Topic: "shop", Routes: map[string]outbox.Route{"order.placed": {Exchange: "orders"}},
	})
	err := p.Check(t.Context())
	if err == nil || !strings.Contains(err.Error(), `topic "orders" does not exist`) || !strings.Contains(err.Error(), `topic "shop" confirms`) {
		t.Errorf("found %v", err)
	}
	settings := map[string]string{"min.insync.replicas": "2"}
	must(t, cluster.DeleteTopic("shop"))
	must(t, cluster.CreateTopic("shop", 1, settings))
	must(t, cluster.CreateTopic("orders", 1, settings))
	must(t, p.Check(t.Context()))
	must(t, p.Ready(t.Context()))
	cluster.Close()
	if err := p.Check(t.Context()); err == nil {
		t.Error("no error without a broker")
	}
	if err := p.Ready(t.Context()); err == nil {
		t.Error("ready without a broker")
	}
}

func TestNewPublisher_namesAllViolations(t *testing.T) {
	t.Parallel()
	client, err := kgo.NewClient(kgo.DisableIdempotentWrite(), kgo.RequiredAcks(kgo.LeaderAck()), kgo.ManualFlushing(),
		kgo.DefaultProduceTopic("x"), kgo.DefaultProduceTopicAlways(), kgo.RecordPartitioner(kgo.RoundRobinPartitioner()))
	must(t, err)
	defer client.Close()
	_, err = outboxkafka.NewPublisher(client, outboxkafka.Config{Topic: "a b", Format: format.CloudEvents{}})
	for _, want := range []string{
		"AllISRAcks", "DisableIdempotentWrite", "AllowIdempotentProduceCancellation", "ManualFlushing", "DefaultProduceTopicAlways",
		"RecordPartitioner", "Topic", "Format",
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not name %s", err, want)
		}
	}
	if _, err := outboxkafka.NewPublisher(nil, outboxkafka.Config{}); err == nil || !strings.Contains(err.Error(), "client is nil") {
		t.Errorf("nil client: %v", err)
	}
	transactional, err := kgo.NewClient(kgo.TransactionalID("x"))
	must(t, err)
	defer transactional.Close()
	if _, err := outboxkafka.NewPublisher(transactional, outboxkafka.Config{}); err == nil || !strings.Contains(err.Error(), "TransactionalID") {
		t.Errorf("transactional client: %v", err)
	}
}
