// Package kafkatest gives tests a Kafka: a fake cluster, or the brokers that HOLDFAST_TEST_KAFKA_URL names.
package kafkatest

import (
	"context"
	"crypto/rand"
	"errors"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// Brokers returns the addresses in HOLDFAST_TEST_KAFKA_URL, separated by commas. If it is not set, they are the addresses
// of a fake cluster of three brokers, which is closed when the test ends.
func Brokers(t testing.TB) []string {
	t.Helper()
	if url := os.Getenv("HOLDFAST_TEST_KAFKA_URL"); url != "" {
		return strings.Split(url, ",")
	}
	return Fake(t, kfake.NumBrokers(3)).ListenAddrs()
}

// Fake starts a fake cluster, which is closed when the test ends.
func Fake(t testing.TB, opts ...kfake.Opt) *kfake.Cluster {
	t.Helper()
	cluster, err := kfake.NewCluster(opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cluster.Close)
	return cluster
}

// Client returns a client that a Publisher can use, with short waits between retries. It is closed when the test ends.
func Client(t testing.TB, brokers []string, opts ...kgo.Opt) *kgo.Client {
	t.Helper()
	client, err := kgo.NewClient(append([]kgo.Opt{
		kgo.SeedBrokers(brokers...), kgo.AllowIdempotentProduceCancellation(), kgo.MetadataMinAge(50 * time.Millisecond),
		kgo.RetryBackoffFn(func(int) time.Duration { return 50 * time.Millisecond }),
	}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	return client
}

// Topic creates a topic that no other test has, with three partitions, and one more for each suffix of its name. They are
// deleted when the test ends.
func Topic(t testing.TB, brokers []string, suffixes ...string) string {
	t.Helper()
	name, client := "t"+strings.ToLower(rand.Text()[:10]), Client(t, brokers)
	create, drop := kmsg.NewPtrCreateTopicsRequest(), kmsg.NewPtrDeleteTopicsRequest()
	for _, suffix := range append(suffixes, "") {
		topic := kmsg.NewCreateTopicsRequestTopic()
		topic.Topic, topic.NumPartitions, topic.ReplicationFactor = name+suffix, 3, -1
		create.Topics = append(create.Topics, topic)
		dropped := kmsg.NewDeleteTopicsRequestTopic()
		dropped.Topic = kmsg.StringPtr(name + suffix)
		drop.TopicNames, drop.Topics = append(drop.TopicNames, name+suffix), append(drop.Topics, dropped)
	}
	response, err := create.RequestWith(t.Context(), client)
	if err != nil {
		t.Fatal(err)
	}
	for _, topic := range response.Topics {
		if err := kerr.ErrorForCode(topic.ErrorCode); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		if _, err := drop.RequestWith(context.WithoutCancel(t.Context()), client); err != nil {
			t.Error(err)
		}
	})
	return name
}

// Reader reads a topic from its start.
type Reader struct {
	client  *kgo.Client
	records []*kgo.Record
}

// NewReader returns a Reader of a topic.
func NewReader(t testing.TB, brokers []string, topic string) *Reader {
	t.Helper()
	return &Reader{client: Client(t, brokers, kgo.ConsumeTopics(topic), kgo.FetchMaxWait(100*time.Millisecond))}
}

// Records returns the records that have arrived until now, in the order of their partitions. One goroutine may call it.
func (r *Reader) Records(ctx context.Context) []*kgo.Record {
	for {
		poll, cancel := context.WithTimeout(ctx, 200*time.Millisecond) // timing: a record that comes later is for the next call
		fetches := r.client.PollFetches(poll)
		cancel()
		if fetches.NumRecords() == 0 {
			return r.records
		}
		r.records = append(r.records, fetches.Records()...)
	}
}

// Header returns the value of a record's header, and whether there is one.
func Header(r *kgo.Record, name string) (string, bool) {
	for _, h := range r.Headers {
		if h.Key == name {
			return string(h.Value), true
		}
	}
	return "", false
}

// Line is the way to the brokers, which can be cut. Use its Dial with kgo.Dialer.
type Line struct {
	mu    sync.Mutex
	cut   bool
	conns []net.Conn
}

var errCut = errors.New("kafkatest: the line is cut")

// Dial connects, or fails while the line is cut.
func (l *Line) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cut {
		return nil, errors.Join(errCut, conn.Close())
	}
	l.conns = append(l.conns, conn)
	return conn, nil
}

// Cut closes all connections and rejects new ones.
func (l *Line) Cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cut = true
	for _, conn := range l.conns {
		_ = conn.Close() // the client may have closed it
	}
	l.conns = nil
}

// Heal allows connections again.
func (l *Line) Heal() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cut = false
}
