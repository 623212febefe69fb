package inboxamqp_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// attempt is an order that was tried before.
func attempt(n int) amqp.Publishing {
	p := order()
	p.Headers = amqp.Table{"holdfast-attempt": strconv.Itoa(n), "holdfast-first-failed-at": time.Now().UTC().Format(time.RFC3339Nano)}
	return p
}

func asMessage(p amqp.Publishing, attempt int) *inbox.Message {
	return &inbox.Message{ID: uuid.MustParse(p.MessageId), Name: p.Type, Attempt: attempt}
}

// The leftover of an attempt is dropped once its retry is known of, and only then.
func TestLeftover(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	ledger := memory.NewLedger()
	var got recorder
	dropped := make(chan struct{})
	got.fail = func(m *inbox.Message) error {
		if m.Attempt < 3 {
			return errBroken
		}
		<-dropped // once the message is processed its entry goes
		return nil
	}
	var log logBuffer
	r := consume(t, b, &got, config{Queue: "orders", Retry: quick, Ledger: ledger, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	release := sync.OnceFunc(func() { close(dropped) })
	defer release()
	p := order()
	b.Publish(t, "", "orders", p)
	got.await(t, 2)
	second := attempt(2)
	second.MessageId = p.MessageId
	testenv.Eventually(t, patience, func() error {
		e, err := ledger.Look(t.Context(), uuid.MustParse(p.MessageId))
		if err == nil && e.Attempt != 3 {
			err = fmt.Errorf("entry %+v", e)
		}
		return err
	})
	b.Publish(t, "", "orders", second) // what a crash after the retry would have left
	testenv.Eventually(t, patience, func() error {
		if !strings.Contains(log.String(), "leftover of an earlier attempt dropped") {
			return errors.New("the leftover was not dropped")
		}
		return nil
	})
	release()
	got.await(t, 3)
	awaitDepth(t, b, "orders", 0)
	r.stop(t)
	var attempts []int
	for _, m := range got.messages() {
		attempts = append(attempts, m.Attempt)
	}
	if !slices.Equal(attempts, []int{1, 2, 3}) {
		t.Errorf("attempts %v", attempts)
	}
	if e, _ := ledger.Look(t.Context(), uuid.MustParse(p.MessageId)); e != (driver.LedgerEntry{}) {
		t.Errorf("entry of a processed message: %+v", e)
	}
}

// deliverInVain has the message in the queue delivered to somebody who does not settle it.
func deliverInVain(t *testing.T, b *amqptest.Broker) {
	t.Helper()
	conn, err := b.Dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ch, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	if _, found, err := ch.Get("orders", false); err != nil || !found {
		t.Fatalf("found %v, error %v", found, err)
	}
	if err := conn.Close(); err != nil {
		t.Fatal(err)
	}
}

// A message in whose runs the process ended is run alone, and in the end not any more; what
// ran beside it is spared.
func TestQuarantine(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	ledger := memory.NewLedger()
	killer, suspect, neighbour := attempt(2), attempt(2), attempt(2)
	for _, crashed := range []struct {
		p amqp.Publishing
		n int
	}{{killer, 3}, {suspect, 2}} {
		for range crashed.n {
			if err := ledger.Start(t.Context(), asMessage(crashed.p, 2)); err != nil {
				t.Fatal(err)
			}
		}
	}
	b.Queue(t, "orders", nil)
	b.Publish(t, "", "orders", killer)
	deliverInVain(t, b)
	for _, p := range []amqp.Publishing{order(), neighbour, order(), suspect, order(), order(), order()} {
		b.Publish(t, "", "orders", p)
	}
	var running, most atomic.Int64
	var beside sync.Map
	r := consume(t, b, processorFunc(func(_ context.Context, m *inbox.Message) error {
		n := running.Add(1)
		defer running.Add(-1)
		most.Store(max(most.Load(), n))
		time.Sleep(50 * time.Millisecond)
		beside.Store(m.ID.String(), max(n, running.Load()))
		return nil
	}), config{Queue: "orders", Retry: quick, Ledger: ledger, MaxCrashes: 3, Concurrency: 4})
	dead := b.Take(t, "failed.quarantined", 1, patience)[0]
	if dead.MessageId != killer.MessageId || dead.Headers["holdfast-attempt"] != "2" {
		t.Errorf("quarantined %+v", dead)
	}
	testenv.Eventually(t, patience, func() error {
		n := 0
		beside.Range(func(any, any) bool { n++; return true })
		if n != 7 {
			return fmt.Errorf("%d of 7 processed", n)
		}
		return nil
	})
	r.stop(t)
	if n, _ := beside.Load(suspect.MessageId); n != int64(1) {
		t.Errorf("%v messages ran beside the suspect", n)
	}
	if _, ran := beside.Load(killer.MessageId); ran || most.Load() < 2 {
		t.Errorf("killer ran: %v; at most %d ran at once", ran, most.Load())
	}
	if e, _ := ledger.Look(t.Context(), uuid.MustParse(suspect.MessageId)); e.Open != 0 {
		t.Errorf("the suspect's entry: %+v", e)
	}
}

// Copies that are in progress elsewhere are open runs as well: what comes for the first time
// has ended no process.
func TestOpenRunsOfOtherCopies(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	ledger := memory.NewLedger()
	p := attempt(2)
	for range 3 {
		if err := ledger.Start(t.Context(), asMessage(p, 2)); err != nil {
			t.Fatal(err)
		}
	}
	var got recorder
	consume(t, b, &got, config{Queue: "orders", Retry: quick, Ledger: ledger, MaxCrashes: 3})
	b.Publish(t, "", "orders", p)
	got.await(t, 1)
	awaitDepth(t, b, "failed.quarantined", 0)
}

// While the ledger cannot be asked, what needs it waits, uncounted.
func TestLedgerUnavailable(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	ledger := &brokenLedger{Ledger: memory.NewLedger()}
	ledger.broken.Store(true)
	var got recorder
	r := consume(t, b, &got, config{Queue: "orders", Retry: quick, Ledger: ledger})
	b.Publish(t, "", "orders", attempt(2))
	testenv.Eventually(t, patience, func() error {
		if r.Ready(t.Context()) == nil {
			return errors.New("ready")
		}
		return nil
	})
	ledger.broken.Store(false)
	if m := got.await(t, 1)[0]; m.Attempt != 2 {
		t.Errorf("attempt %d", m.Attempt)
	}
}

type brokenLedger struct {
	driver.Ledger
	broken atomic.Bool
}

func (l *brokenLedger) Look(ctx context.Context, id uuid.UUID) (driver.LedgerEntry, error) {
	if l.broken.Load() {
		return driver.LedgerEntry{}, errBroken
	}
	return l.Ledger.Look(ctx, id)
}

// A drain closes the runs it has to give up: it is not the messages that end the process.
func TestDrainClosesRuns(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	ledger := memory.NewLedger()
	started, release := make(chan struct{}), make(chan struct{})
	t.Cleanup(func() { close(release) })
	r := consume(t, b, processorFunc(func(context.Context, *inbox.Message) error {
		close(started)
		<-release
		return nil
	}), config{Queue: "orders", Retry: quick, Ledger: ledger, ShutdownTimeout: 3 * time.Second})
	p := attempt(2)
	b.Publish(t, "", "orders", p)
	<-started
	if e, _ := ledger.Look(t.Context(), uuid.MustParse(p.MessageId)); e.Open != 1 {
		t.Errorf("while it runs: %+v", e)
	}
	r.stop(t)
	if e, _ := ledger.Look(t.Context(), uuid.MustParse(p.MessageId)); e.Open != 0 {
		t.Errorf("after the drain: %+v", e)
	}
}

// Dead letters that were moved back by other means than DeadLetters begin anew.
func TestShovelledBack(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	ledger := memory.NewLedger()
	var failing atomic.Bool
	failing.Store(true)
	got := recorder{fail: failWhile(&failing, errBroken)}
	r := consume(t, b, &got, config{Queue: "orders", Retry: inbox.RetryPolicy{MaxAttempts: 2, BaseDelay: 50 * time.Millisecond}, Ledger: ledger})
	b.Publish(t, "", "orders", order())
	dead := b.Take(t, "failed.default", 1, patience)[0]
	before := len(got.messages())
	b.Publish(t, "", "orders", amqp.Publishing{
		Headers: dead.Headers, MessageId: dead.MessageId, Type: dead.Type, ContentType: dead.ContentType, DeliveryMode: 2, Body: dead.Body,
	})
	for i, m := range got.await(t, before+2)[before:] {
		if m.Attempt != i+1 || m.Replays != 1 {
			t.Errorf("delivery %d: attempt %d, replays %d", i, m.Attempt, m.Replays)
		}
	}
	again := b.Take(t, "failed.default", 1, patience)[0]
	if again.Headers["holdfast-attempt"] != "2" || again.Headers["holdfast-replays"] != "1" {
		t.Errorf("headers %v", again.Headers)
	}
	r.stop(t)
}
