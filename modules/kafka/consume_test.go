// Package kafka_test has the code of README.md, with its tests.
package kafka_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/modules/kafka/internal/kafkatest"
	"github.com/holdfast-go/holdfast/modules/kafka/outboxkafka"
	"github.com/holdfast-go/holdfast/outbox/outboxtest/conformance"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// newGroup returns a client of the group billing.
func newGroup(brokers []string, topic string, opts ...kgo.Opt) (*kgo.Client, error) {
	return kgo.NewClient(append(opts, kgo.SeedBrokers(brokers...), kgo.ConsumerGroup("billing-"+topic), kgo.ConsumeTopics(topic),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.DisableAutoCommit(), kgo.BlockRebalanceOnPoll())...)
}

// consume processes the records of the client's group until ctx ends or a broker fails. It closes the client, which has
// moved past records that are not processed. Start it again with a new one after an error.
func consume(ctx context.Context, client *kgo.Client, p inbox.Processor, retries inbox.RetryPolicy) error {
	defer client.CloseAllowingRebalance()
	for {
		polled := client.PollRecords(ctx, 100)
		if err := polled.Err(); err != nil {
			return err
		}
		for r := range polled.RecordsAll() {
			if err := settle(ctx, client, p, retries, r); err != nil {
				return err
			}
		}
		if err := client.CommitUncommittedOffsets(ctx); err != nil {
			return err
		}
		client.AllowRebalance()
	}
}

// settle returns nil when the record is processed or stored as a dead letter. Until then its partition waits.
func settle(ctx context.Context, client *kgo.Client, p inbox.Processor, retries inbox.RetryPolicy, r *kgo.Record) error {
	for m := message(r); ; {
		result := p.Process(ctx, []*inbox.Message{m})[0]
		if result == nil { // done, or a duplicate
			return nil
		}
		failure := driver.Classify(result)
		next := driver.Next(retries, m, failure, time.Now(), rand.Float64())
		if next.Action == driver.ActionDead {
			headers := append(slices.Clone(r.Headers), kgo.RecordHeader{Key: "holdfast-failure-class", Value: []byte(failure.Class)})
			return client.ProduceSync(ctx, &kgo.Record{Topic: r.Topic + ".dead", Key: r.Key, Value: r.Value, Headers: headers}).FirstErr()
		}
		if next.Counted {
			m.Attempt++
			m.FirstFailedAt = cmp.Or(m.FirstFailedAt, time.Now())
		}
		if next.Recovered {
			m.Recovered++
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(max(next.Delay, 100*time.Millisecond)): // timing: the delay of the policy; none if a server is down
		}
	}
}

func message(r *kgo.Record) *inbox.Message {
	headers := make(map[string]string, len(r.Headers))
	for _, h := range r.Headers {
		headers[h.Key] = string(h.Value)
	}
	id, _ := uuid.Parse(headers["holdfast-id"]) // without one, the processor rejects the message
	return &inbox.Message{
		ID: id, Name: headers["holdfast-name"], Body: r.Value, ContentType: headers["content-type"], Key: string(r.Key),
		Headers: headers, Queue: r.Topic, Attempt: 1, PublishedAt: r.Timestamp,
	}
}

// effects is a handler that notes its effects, and fails as the texts say.
type effects struct {
	mu    sync.Mutex
	done  []string
	tries map[string]int
	down  bool
}

func (e *effects) handle(_ context.Context, _ pgx.Tx, text string) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.tries[text]++
	switch {
	case e.down:
		return inbox.Unavailable(errors.New("the bank is down"))
	case text == "broken":
		return inbox.Unrecoverable(errors.New("no such order"))
	case text == "unlucky", text == "slow" && e.tries[text] < 3:
		return errors.New("try again")
	}
	e.done = append(e.done, text)
	return nil
}

// wait waits until the effects are these, in this order.
func (e *effects) wait(t *testing.T, want ...string) {
	t.Helper()
	testenv.Eventually(t, func() error {
		e.mu.Lock()
		defer e.mu.Unlock()
		if !slices.Equal(e.done, want) {
			return fmt.Errorf("effects %v, want %v", e.done, want)
		}
		return nil
	})
}

// shop is a topic with the effects of its messages.
type shop struct {
	brokers []string
	topic   string
	effects *effects
	books   *inboxpgx.Store
}

func newShop(t *testing.T, brokers []string) *shop {
	t.Helper()
	s := &shop{brokers: brokers, topic: kafkatest.Topic(t, brokers, ".dead"), effects: &effects{tries: map[string]int{}}}
	var err error
	s.books, err = inboxtest.New(txretrytest.New(txretrytest.Config{}), "billing", inboxpgx.Config{})
	must(t, err)
	must(t, inboxpgx.Handle(s.books, "order.placed", s.effects.handle))
	return s
}

// publish publishes messages of one key.
func (s *shop) publish(t *testing.T, texts ...string) {
	t.Helper()
	p, err := outboxkafka.NewPublisher(kafkatest.Client(t, s.brokers), outboxkafka.Config{Topic: s.topic})
	must(t, err)
	for _, text := range texts {
		m := conformance.NewMessage(t, "order.placed", text)
		m.Key = "A-1"
		outcome := make(chan error, 1)
		p.Publish(t.Context(), m, func(err error) { outcome <- err })
		must(t, <-outcome)
	}
}

// consume starts the loop. stop ends it as a process would that gets a signal.
func (s *shop) consume(t *testing.T, opts ...kgo.Opt) (ended <-chan error, stop func()) {
	t.Helper()
	client, err := newGroup(s.brokers, s.topic, opts...)
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	result := make(chan error, 1)
	go func() {
		result <- consume(ctx, client, s.books, inbox.RetryPolicy{MaxAttempts: 3, BaseDelay: time.Millisecond})
		close(result)
	}()
	return result, cancel
}

// cancelled waits for the end of a loop whose context has ended.
func cancelled(t *testing.T, ended <-chan error) {
	t.Helper()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("the loop ended with %v", err)
	}
}

// A message that fails stops its partition while it is retried. In the end it is a dead letter, and the next ones continue.
func TestConsume_failures(t *testing.T) {
	t.Parallel()
	s := newShop(t, kafkatest.Brokers(t))
	s.publish(t, "one", "slow", "broken", "unlucky", "two")
	ended, stop := s.consume(t)
	s.effects.wait(t, "one", "slow", "two")
	letters := kafkatest.NewReader(t, s.brokers, s.topic+".dead")
	testenv.Eventually(t, func() error {
		classes := map[string]string{}
		for _, r := range letters.Records(t.Context()) {
			classes[string(r.Value)], _ = kafkatest.Header(r, "holdfast-failure-class")
		}
		if len(classes) != 2 || classes[`"broken"`] != driver.ClassUnrecoverable || classes[`"unlucky"`] != driver.ClassDefault {
			return fmt.Errorf("dead letters %v", classes)
		}
		return nil
	})
	stop()
	cancelled(t, ended)
	s.effects.mu.Lock()
	defer s.effects.mu.Unlock()
	if s.effects.tries["slow"] != 3 || s.effects.tries["unlucky"] != 3 || s.effects.tries["broken"] != 1 {
		t.Errorf("runs %v", s.effects.tries)
	}
}

// While a server is down, the message waits and is not charged an attempt.
func TestConsume_serverDown(t *testing.T) {
	t.Parallel()
	s := newShop(t, kafkatest.Brokers(t))
	s.effects.down = true
	s.publish(t, "one", "two")
	ended, stop := s.consume(t)
	testenv.Eventually(t, func() error {
		s.effects.mu.Lock()
		defer s.effects.mu.Unlock()
		if n := s.effects.tries["one"]; n < 5 { // more than MaxAttempts
			return fmt.Errorf("%d runs", n)
		}
		s.effects.down = false
		return nil
	})
	s.effects.wait(t, "one", "two")
	stop()
	cancelled(t, ended)
}

// Without a commit the records come again. Their effects do not.
func TestConsume_failedCommit(t *testing.T) {
	t.Parallel()
	cluster := kafkatest.Fake(t)
	s := newShop(t, cluster.ListenAddrs())
	cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.OffsetCommit}, Err: kerr.UnknownMemberID})
	s.publish(t, "one", "two")
	ended, stop := s.consume(t)
	if err := <-ended; !errors.Is(err, kerr.UnknownMemberID) {
		t.Errorf("the loop ended with %v", err)
	}
	stop()
	ended, stop = s.consume(t)
	s.publish(t, "three")
	s.effects.wait(t, "one", "two", "three")
	stop()
	cancelled(t, ended)
}

// A loop that ends before it has settled its batch comes back to the rest of it. A client that has polled would not.
func TestConsume_failedDeadLetter(t *testing.T) {
	t.Parallel()
	cluster := kafkatest.Fake(t)
	s := newShop(t, cluster.ListenAddrs())
	s.publish(t, "one", "broken", "two")
	cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Err: kerr.TopicAuthorizationFailed})
	client, err := newGroup(s.brokers, s.topic)
	must(t, err)
	for _, want := range []error{kerr.TopicAuthorizationFailed, kgo.ErrClientClosed} {
		ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
		defer cancel()
		if err := consume(ctx, client, s.books, inbox.RetryPolicy{}); !errors.Is(err, want) {
			t.Fatalf("the loop ended with %v, want %v", err, want)
		}
	}
	ended, stop := s.consume(t)
	s.effects.wait(t, "one", "two")
	stop()
	cancelled(t, ended)
	if s.effects.tries["broken"] != 2 {
		t.Errorf("the message without a dead letter was tried %d times, want 2", s.effects.tries["broken"])
	}
}

// A loop that waits too long loses its partitions to another process of the group. Its commit fails, and each effect
// happens once.
func TestConsume_losesItsPartitions(t *testing.T) {
	t.Parallel()
	cluster := kafkatest.Fake(t)
	s := newShop(t, cluster.ListenAddrs())
	s.publish(t, "one", "two")
	s.effects.down = true
	slow, stopSlow := s.consume(t, kgo.RebalanceTimeout(500*time.Millisecond))
	testenv.Eventually(t, func() error {
		s.effects.mu.Lock()
		defer s.effects.mu.Unlock()
		if s.effects.tries["one"] == 0 {
			return errors.New("the first process has no record yet")
		}
		return nil
	})
	first, err := cluster.WaitGroupStable(t.Context(), "billing-"+s.topic, 1)
	must(t, err)
	other, stopOther := s.consume(t, kgo.RebalanceTimeout(500*time.Millisecond))
	_, err = cluster.WaitGroupInfo(t.Context(), "billing-"+s.topic, func(g *kfake.GroupInfo) bool {
		return len(g.Members) == 1 && g.NumAssigned() == first.NumAssigned() && g.Members[0].MemberID != first.Members[0].MemberID
	})
	must(t, err)
	s.effects.mu.Lock()
	s.effects.down = false
	s.effects.mu.Unlock()
	if err := <-slow; !errors.Is(err, kerr.UnknownMemberID) {
		t.Errorf("the slow process ended with %v, want a failed commit", err)
	}
	s.effects.wait(t, "one", "two")
	stopSlow()
	stopOther()
	cancelled(t, other)
	s.effects.wait(t, "one", "two")
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
