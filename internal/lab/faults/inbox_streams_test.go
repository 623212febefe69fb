package faults_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/lab/ledger"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// badStream is a kind of bad messages, with what is wrong about their dead-letter queue.
type badStream struct {
	spoil      func(m *amqp.Publishing)
	fail       error // of the handler
	spoilQueue func(t *testing.T, b *amqptest.Broker) *amqptest.Broker
}

var errStream = errors.New("as the message wants it")

var badStreams = map[string]badStream{
	"dead-letter queue full": {fail: inbox.Unrecoverable(errStream), spoilQueue: func(t *testing.T, b *amqptest.Broker) *amqptest.Broker {
		b.Full(t, "failed.unrecoverable")
		return b
	}},
	"dead-letter queue missing": {fail: inbox.Unrecoverable(errStream), spoilQueue: func(t *testing.T, b *amqptest.Broker) *amqptest.Broker {
		must(t, ledger.OnBroker(t.Context(), b.URL, func(ch *amqp.Channel) error {
			_, err := ch.QueueDelete("failed.unrecoverable", false, false, false)
			return err
		}))
		return b
	}},
	"dead letters forbidden": {fail: inbox.Unrecoverable(errStream), spoilQueue: func(t *testing.T, b *amqptest.Broker) *amqptest.Broker {
		return b.User(t, "reader", amqptest.Rights{Read: ".*"})
	}},
	"huge foreign headers": {fail: inbox.Unrecoverable(errStream), spoil: func(m *amqp.Publishing) {
		m.Headers = amqp.Table{"holdfast-junk": strings.Repeat("h", 90<<10)}
	}},
	"undecodable":        {spoil: func(m *amqp.Publishing) { m.Body = []byte("{") }},
	"unknown":            {spoil: func(m *amqp.Publishing) { m.Type, m.MessageId = "faults.unknown", "" }},
	"always unavailable": {fail: inbox.Unavailable(errStream)},
	"recoverable":        {fail: inbox.Recoverable(errStream)},
}

// phase is a time in which good messages were sent, and how they fared.
type phase struct {
	name  string
	bad   int // per second
	took  time.Duration
	delay []time.Duration // of each good message from sending to its handler
	lost  int             // not handled within inTime
}

func (p *phase) String() string {
	slices.Sort(p.delay)
	at := func(share float64) float64 {
		if len(p.delay) == 0 {
			return 0
		}
		return float64(p.delay[int(share*float64(len(p.delay)-1))].Microseconds()) / 1000
	}
	return fmt.Sprintf("%s: p50 %.1f ms, p95 %.1f ms, %.0f %% in time", p.name, at(0.5), at(0.95), 100*p.share())
}

func (p *phase) share() float64 {
	n := len(p.delay) + p.lost
	return float64(len(p.delay)) / float64(max(n, 1))
}

const (
	goodRate = 100 // per second
	inTime   = 3 * time.Second
)

// A stream of bad messages, of each kind, slow and fast, leaves the good ones among them their rate
// and their latency, and what they were before comes back after it. A control consumer on the same
// broker gets the good ones alone: what it loses is the machine's fault.
func TestInboxStreamsOfBadMessages(t *testing.T) {
	t.Parallel()
	testenv.AMQPURL(t) // skips before there are subtests
	for name, kind := range badStreams {
		for _, queueType := range []string{"classic", "quorum"} {
			t.Run(fmt.Sprintf("%s/%s", name, queueType), func(t *testing.T) {
				t.Parallel()
				b := amqptest.New(t)
				inPhases(t, newStream(t, b, badStream{}, "control", queueType), newStream(t, b, kind, "stream", queueType))
			})
		}
	}
}

// inPhases sends good messages to both, and bad ones among them to the second. The fast ones are as
// many as leave the machine room for the good ones: a bad one costs several times as much. What fails
// is tried again, with as many as fit; in a long run, which has the machine alone, only where there is
// measured to be less room than before.
func inPhases(t *testing.T, control, s *stream) {
	t.Helper()
	const tries = 3
	fast := min(100, control.capacity(t, s.bad().Headers)/5)
	for try := 1; ; try++ {
		wrong := comparePhases(t, control, s, fast)
		control.all(t)
		s.all(t)
		if len(wrong) == 0 {
			return
		}
		if try == tries {
			t.Fatal(strings.Join(wrong, "\n"))
		}
		room := min(100, control.capacity(t, s.bad().Headers)/5)
		if room >= fast && long(t) {
			t.Fatal(strings.Join(wrong, "\n"))
		}
		t.Logf("%d bad ones a second were too many, %d fit: %s", fast, room, strings.Join(wrong, "; "))
		fast = min(fast, room)
	}
}

// comparePhases returns what the bad messages have done to the good ones among them.
func comparePhases(t *testing.T, control, s *stream, fast int) (wrong []string) {
	t.Helper()
	second := time.Duration(scaled(t, 10)) * 60 * time.Millisecond
	phases := []*phase{
		{name: "before", took: 2 * second},
		{name: "2/s", bad: 2, took: 4 * second},
		{name: strconv.Itoa(fast) + "/s", bad: fast, took: 4 * second},
		{name: "after", took: 4 * second},
	}
	var controls []*phase
	for _, p := range phases {
		beside := &phase{name: "control of " + p.name, took: p.took}
		controls = append(controls, beside)
		var both sync.WaitGroup
		both.Go(func() { control.send(t, beside) })
		s.send(t, p)
		both.Wait()
	}
	time.Sleep(inTime)
	s.judge()
	control.judge()
	for i, p := range phases {
		t.Log(p)
		t.Log(controls[i])
		if least := 0.8 * controls[i].share(); p.share() < least {
			wrong = append(wrong, fmt.Sprintf("%s: %.0f %% of the good messages in time, %.0f %% where there are no bad ones", p.name, 100*p.share(), 100*controls[i].share()))
		}
	}
	return wrong
}

// stream is a consumer with a queue.
type stream struct {
	kind badStream
	// publishing has do publish, and returns when all is confirmed.
	publishing func(ctx context.Context, do func(publish func(amqp.Publishing) error) error) error

	mu      sync.Mutex
	sent    map[string]time.Time // good messages
	phaseOf map[string]*phase
	handled map[string]time.Time
}

func newStream(t *testing.T, b *amqptest.Broker, kind badStream, queue, queueType string) *stream {
	t.Helper()
	s := emptyStream(kind)
	s.publishing = confirmedBy(b.URL, queue)
	mux := s.mux(t)
	cfg := inboxamqp.Config{Classic: queueType == "classic", ConsumerConfig: inbox.ConsumerConfig{Logger: quiet}}
	consumer := func() *inboxamqp.Consumer {
		url := b.URL
		c, err := inboxamqp.NewConsumer(func(context.Context) (*amqp.Connection, error) { return amqp.Dial(url) }, queue, mux, cfg)
		must(t, err)
		return c
	}
	must(t, consumer().Setup(t.Context()))
	if kind.spoilQueue != nil {
		b = kind.spoilQueue(t, b)
	}
	c := consumer()
	beside(t, c.Run)
	untilTrue(t, "the consumer is at work", func() bool { return c.Ready(t.Context()) == nil })
	return s
}

func emptyStream(kind badStream) *stream {
	return &stream{kind: kind, sent: map[string]time.Time{}, phaseOf: map[string]*phase{}, handled: map[string]time.Time{}}
}

func (s *stream) mux(t *testing.T) *inbox.Mux {
	t.Helper()
	mux := inbox.NewMux()
	must(t, inbox.Handle(mux, "good", s.good))
	must(t, inbox.Handle(mux, "bad", func(context.Context, struct{}) error { return s.kind.fail }))
	return mux
}

// confirmedBy publishes to a queue of RabbitMQ.
func confirmedBy(url, queue string) func(context.Context, func(func(amqp.Publishing) error) error) error {
	return func(ctx context.Context, do func(func(amqp.Publishing) error) error) error {
		return ledger.OnBroker(ctx, url, func(ch *amqp.Channel) error {
			if err := ch.Confirm(false); err != nil {
				return err
			}
			var confirms []*amqp.DeferredConfirmation
			if err := do(func(m amqp.Publishing) error {
				confirm, err := ch.PublishWithDeferredConfirm("", queue, true, false, m)
				confirms = append(confirms, confirm)
				return err
			}); err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(ctx, patience)
			defer cancel()
			for _, confirm := range confirms {
				if taken, err := confirm.WaitContext(ctx); err != nil || !taken {
					return errors.Join(err, errors.New("not confirmed"))
				}
			}
			return nil
		})
	}
}

func (s *stream) good(ctx context.Context, _ struct{}) error {
	m, _ := inbox.FromContext(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	if id := m.ID.String(); s.handled[id].IsZero() {
		s.handled[id] = time.Now()
	}
	return nil
}

// send publishes for the time of a phase, at its rates. What a late tick has to catch up on is bad and
// good in turn: some of the bad ones, all at once, are what an outage looks like.
func (s *stream) send(t *testing.T, p *phase) {
	t.Helper()
	must(t, s.publishing(t.Context(), func(publish func(amqp.Publishing) error) error {
		const tick = 10 * time.Millisecond
		ticker := time.NewTicker(tick)
		defer ticker.Stop()
		began, good, bad := time.Now(), 0, 0
		for elapsed := time.Duration(0); elapsed < p.took; elapsed = time.Since(began) {
			for behind := true; behind; {
				behind = false
				if float64(bad) < elapsed.Seconds()*float64(p.bad) {
					behind, bad = true, bad+1
					if err := publish(s.bad()); err != nil {
						return err
					}
				}
				if float64(good) < elapsed.Seconds()*goodRate {
					behind, good = true, good+1
					if err := publish(s.next(p)); err != nil {
						return err
					}
				}
			}
			<-ticker.C
		}
		return nil
	}))
}

// capacity is how many good messages with such headers the consumer handles in a second.
func (s *stream) capacity(t *testing.T, headers amqp.Table) int {
	t.Helper()
	const burst = 200
	before, began := &phase{name: "capacity"}, time.Now()
	must(t, s.publishing(t.Context(), func(publish func(amqp.Publishing) error) error {
		for range burst {
			m := s.next(before)
			m.Headers = headers
			if err := publish(m); err != nil {
				return err
			}
		}
		return nil
	}))
	s.all(t)
	return max(100, int(burst/time.Since(began).Seconds()))
}

// next is a good message of a phase.
func (s *stream) next(p *phase) amqp.Publishing {
	m := amqp.Publishing{MessageId: ids.New().String(), Type: "good", DeliveryMode: amqp.Persistent, Body: []byte("{}")}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sent[m.MessageId], s.phaseOf[m.MessageId] = time.Now(), p
	return m
}

func (s *stream) bad() amqp.Publishing {
	m := amqp.Publishing{MessageId: ids.New().String(), Type: "bad", DeliveryMode: amqp.Persistent, Body: []byte("{}")}
	if s.kind.spoil != nil {
		s.kind.spoil(&m)
	}
	return m
}

// judge sorts the good messages into those in time and the others, by the phase they were sent in.
func (s *stream) judge() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, p := range s.phaseOf {
		if at := s.handled[id]; !at.IsZero() && at.Sub(s.sent[id]) < inTime {
			p.delay = append(p.delay, at.Sub(s.sent[id]))
		} else {
			p.lost++
		}
	}
	clear(s.phaseOf)
}

// all waits until each good message was handled.
func (s *stream) all(t *testing.T) {
	t.Helper()
	testenv.Eventually(t, func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(s.handled) < len(s.sent) {
			return errors.New(strconv.Itoa(len(s.sent)-len(s.handled)) + " good messages were not handled")
		}
		return nil
	})
}
