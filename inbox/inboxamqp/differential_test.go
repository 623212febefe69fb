package inboxamqp_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
)

// The fake and RabbitMQ must produce the same runs, dead letters and counts. The input is random messages, each
// with a script of results for its runs, and random operations on the dead letters. A number identifies each
// sequence.
func TestDifferentialBroker(t *testing.T) {
	t.Parallel()
	testenv.AMQPURL(t)  // skips the test without a server
	const together = 25 // sequences in one virtual host: its queues go with it, and thousands would fill the broker's memory
	letters := 0
	sequences := testenv.Sequences(t, 4)
	for first := 0; first < sequences; first += together {
		passed := t.Run(fmt.Sprint(first), func(t *testing.T) {
			b := amqptest.New(t)
			for n := first; n < min(first+together, sequences); n++ {
				letters += newPlay(n).compare(t, n, b)
			}
		})
		if !passed {
			return
		}
	}
	if letters == 0 {
		t.Error("no sequence had a dead letter")
	}
}

// compare plays sequence n on the fake and on RabbitMQ, and returns the number of dead letters.
func (p *play) compare(t *testing.T, n int, b *amqptest.Broker) int {
	t.Helper()
	var fake []string
	synctest.Test(t, func(t *testing.T) { fake = p.onFake(t) })
	real := p.onRabbitMQ(t, b, fmt.Sprintf("orders%d", n), fake)
	for i := range fake {
		if fake[i] != real[i] {
			t.Fatalf("sequence %d, scripts %v:\nRabbitMQ\n%s\nfake\n%s", n, p.scripts, real[i], fake[i])
		}
	}
	return strings.Count(strings.Join(real, "\n"), "letter")
}

// ends are the possible results of a run.
var ends = map[string]func() error{
	"ok":            func() error { return nil },
	"fail":          func() error { return errBroken },
	"recoverable":   func() error { return inbox.RetryAfter(errBroken, 20*time.Millisecond) },
	"unrecoverable": func() error { return inbox.Unrecoverable(errBroken) },
	"payment":       func() error { return inbox.Classed(errBroken, "payment") },
	"payment, dead": func() error { return inbox.Unrecoverable(inbox.Classed(errBroken, "payment")) },
	"other, dead":   func() error { return inbox.Classed(inbox.Unrecoverable(errBroken), "other") },
	"invalid":       func() error { return inbox.Invalid(errBroken) },
	"postpone":      func() error { return inbox.Postpone(errBroken, 20*time.Millisecond) },
	"joined":        func() error { return errors.Join(errBroken, inbox.Recoverable(errBroken)) },
	"panic":         func() error { panic("out of order") },
	"exit":          func() error { runtime.Goexit(); return nil },
}

var differentialRetry = inbox.RetryPolicy{MaxAttempts: 3, BaseDelay: 20 * time.Millisecond, MaxDelay: 40 * time.Millisecond, Jitter: -1}

// play is one sequence.
type play struct {
	scripts [][]string // of each message
	ids     []uuid.UUID
	work    []string
	batch   int
	workers int
}

func newPlay(n int) *play {
	random := rand.New(rand.NewPCG(7, uint64(n)))
	var kinds []string
	for kind := range ends {
		kinds = append(kinds, kind)
	}
	slices.Sort(kinds)
	p := &play{batch: 1 + random.IntN(4), workers: 1 + random.IntN(3)}
	if p.batch > 1 { // a panic or exit fails every message of the same call
		kinds = slices.DeleteFunc(kinds, func(kind string) bool { return kind == "panic" || kind == "exit" })
	}
	for range 6 + random.IntN(10) {
		var script []string
		for range random.IntN(6) {
			script = append(script, kinds[random.IntN(len(kinds))])
		}
		p.scripts = append(p.scripts, script)
		id := ids.New()
		if random.IntN(8) == 0 {
			id = uuid.New() // version 4, which no consumer accepts
		}
		p.ids = append(p.ids, id)
	}
	for range 3 + random.IntN(3) {
		p.work = append(p.work, []string{"list", "dry run", "retry", "remove", "retry all"}[random.IntN(5)])
	}
	return p
}

// actor processes messages by their scripts and records each run.
type actor struct {
	p *play

	mu   sync.Mutex
	runs [][]string
}

func (a *actor) Process(_ context.Context, msgs []*inbox.Message) []error {
	results := make([]error, len(msgs))
	for k, m := range msgs {
		results[k] = errBroken // for a run that exits
		results[k] = a.one(m)
	}
	return results
}

func (a *actor) one(m *inbox.Message) error {
	var i int
	if _, err := fmt.Sscanf(string(m.Body), `{"n":%d}`, &i); err != nil {
		return err
	}
	a.mu.Lock()
	turn := len(a.runs[i])
	a.runs[i] = append(a.runs[i], fmt.Sprintf("%s %d/%d/%d", m.Name, m.Attempt, m.Recovered, m.Replays))
	a.mu.Unlock()
	if script := a.p.scripts[i]; turn < len(script) {
		return ends[script[turn]]()
	}
	return nil
}

func (a *actor) log() (lines []string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i, runs := range a.runs {
		lines = append(lines, fmt.Sprintf("message %d: %s", i, strings.Join(runs, ", ")))
	}
	return lines
}

// deadLetters is the interface of both implementations.
type deadLetters interface {
	List(ctx context.Context, f inbox.Filter) ([]inbox.DeadLetter, error)
	Replay(ctx context.Context, f inbox.Filter, how inbox.Replay) (inbox.Replayed, error)
	Remove(ctx context.Context, f inbox.Filter, r inbox.Removal) (int, error)
}

// perform publishes, works on the dead letters, and returns the state after each step, as reported by settle when
// nothing is in flight.
func (p *play) perform(t *testing.T, a *actor, d deadLetters, publish func(i int), settle func(step int, look func() string) string) (log []string) {
	t.Helper()
	for i := range p.scripts {
		publish(i)
	}
	random := rand.New(rand.NewPCG(8, uint64(len(p.scripts))))
	for step := range 1 + len(p.work) {
		result := "published"
		if step > 0 {
			result = p.act(t, d, p.work[step-1], random)
		}
		log = append(log, settle(step, func() string { return result + "\n" + state(t, a, d) }))
	}
	return log
}

// act performs one operation on some dead letters.
func (p *play) act(t *testing.T, d deadLetters, work string, random *rand.Rand) string {
	t.Helper()
	f := inbox.Filter{Class: []string{"", "default", "payment", "other", "validation"}[random.IntN(5)]}
	if random.IntN(3) == 0 {
		f.Name = []string{"even", "odd"}[random.IntN(2)]
	}
	if random.IntN(4) == 0 {
		f.ErrorContains = "BROKEN"
	}
	if work == "retry all" {
		f = inbox.Filter{}
	}
	what := fmt.Sprintf("%s %+v: ", work, f)
	switch work {
	case "list":
		found, err := d.List(t.Context(), f)
		return what + fmt.Sprint(len(found), err)
	case "remove":
		n, err := d.Remove(t.Context(), f, inbox.Removal{By: "test"})
		return what + fmt.Sprint(n, err)
	default:
		done, err := d.Replay(t.Context(), f, inbox.Replay{By: "test", DryRun: work == "dry run"})
		return what + fmt.Sprintf("%+v %v", done, err)
	}
}

// state returns everything visible: the runs of each message, and the dead letters.
func state(t *testing.T, a *actor, d deadLetters) string {
	t.Helper()
	found, err := d.List(t.Context(), inbox.Filter{Whole: true})
	var texts []string
	for _, l := range found {
		texts = append(texts, fmt.Sprintf("letter %s: %s after %d, %d replays: %s",
			l.Message.Body, l.Class, l.Attempts, l.Message.Replays, reason(l.Error)))
	}
	slices.Sort(texts) // a broker keeps them by class
	return strings.Join(append(append(a.log(), texts...), fmt.Sprint("error: ", err)), "\n")
}

// reason returns an error's text without the consumer's name.
func reason(text string) string {
	_, after, found := strings.Cut(text, ": ")
	if found && strings.HasPrefix(text, "inbox") {
		return after
	}
	return text
}

func (p *play) name(i int) string { return []string{"even", "odd"}[i%2] }

func (p *play) body(i int) []byte { return fmt.Appendf(nil, `{"n":%d}`, i) }

func (p *play) onFake(t *testing.T) []string {
	t.Helper()
	a := &actor{p: p, runs: make([][]string, len(p.scripts))}
	broker := inboxtest.NewBroker()
	consumer, err := inboxtest.NewConsumer(broker, inboxtest.Queue{Name: "orders"}, a, inbox.ConsumerConfig{
		Retry: differentialRetry, Batch: p.batch, Concurrency: p.workers, Logger: slog.New(slog.DiscardHandler),
	})
	must(t, err)
	time.Sleep(time.Until(time.UnixMilli(idTime(p.ids)))) // the ids contain the time outside the bubble
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- consumer.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	return p.perform(t, a, consumer.DeadLetters(), func(i int) {
		m := &inbox.Message{ID: p.ids[i], Name: p.name(i), ContentType: "application/json", Body: p.body(i)}
		must(t, broker.Send(t.Context(), m))
	}, func(_ int, look func() string) string {
		must(t, broker.Idle(t.Context()))
		return look()
	})
}

// onRabbitMQ finishes a step when the state equals the fake's state, and the last step when it stays equal.
func (p *play) onRabbitMQ(t *testing.T, b *amqptest.Broker, queue string, fake []string) []string {
	t.Helper()
	a := &actor{p: p, runs: make([][]string, len(p.scripts))}
	r := consume(t, b, a, config{
		Queue: queue, Classic: true, Retry: differentialRetry, Batch: p.batch, Concurrency: p.workers,
		Classes: []string{"payment"}, DeadLetterPrefix: queue + ".",
	})
	defer r.stop(t)
	letters := newDeadLetters(t, b, config{DeadLetterPrefix: queue + ".", Classes: []string{"payment"}})
	ch := b.Channel(t)
	differs := false // no need to wait longer
	return p.perform(t, a, letters, func(i int) {
		if err := ch.Publish("", queue, true, false, amqp.Publishing{
			MessageId: p.ids[i].String(), Type: p.name(i), ContentType: "application/json", DeliveryMode: amqp.Persistent, Body: p.body(i),
		}); err != nil {
			t.Fatal(err)
		}
	}, func(step int, look func() string) (found string) {
		deadline := time.Now().Add(testenv.Patience)
		for found = look(); found != fake[step] && !differs && time.Now().Before(deadline); found = look() {
			time.Sleep(20 * time.Millisecond)
		}
		differs = differs || found != fake[step]
		if step == len(p.work) {
			time.Sleep(100 * time.Millisecond)
			return look()
		}
		return found
	})
}

// idTime returns the time of the last id, in milliseconds.
func idTime(all []uuid.UUID) (last int64) {
	for _, id := range all {
		if sec, nsec := id.Time().UnixTime(); id.Version() == 7 {
			last = max(last, sec*1000+nsec/1e6)
		}
	}
	return last
}
