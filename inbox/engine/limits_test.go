package engine_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/engine"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
	"github.com/holdfast-go/holdfast/inbox/internal/memqueue"
	"github.com/holdfast-go/holdfast/internal/metrictest"
)

// A name that has the queue for itself keeps it: its messages wait in flight for the limit, in order, and
// none is moved to another queue.
func TestLimit_holdsBackAndMovesNothing(t *testing.T) {
	const mails = 1006
	bubble(t, func(t *testing.T) {
		meter := &metrictest.Recorder{}
		turns := time.NewTicker(time.Second / 5)
		got := &recorder{fail: func(context.Context, *inbox.Message) error {
			<-turns.C
			return nil
		}}
		b := newBench(t, limited{got}, engine.Config{ConsumerConfig: inbox.ConsumerConfig{MeterProvider: meter}}, memqueue.Options{})
		ids := b.put("slow", mails)
		b.start()
		b.idle()
		b.stop()
		seen := got.messages()
		if len(seen) != mails {
			t.Fatalf("%d deliveries of %d messages", len(seen), mails)
		}
		for i, m := range seen {
			if m.ID != ids[i] && (i == 0 || m.ID != ids[i-1]) && (i == mails-1 || m.ID != ids[i+1]) { // two run at once
				t.Fatalf("message %d is out of order", i)
			}
		}
		for _, outcome := range []string{"retried", "put_off", "displaced"} {
			if n := settledAs(meter, outcome); n != 0 {
				t.Errorf("%v messages are %s", n, outcome)
			}
		}
	})
}

// If names share the queue, messages that wait for a limit are moved away once they could block the others.
// They are put off and do not count as retries. A fast handler makes no difference.
func TestLimit_putsOffAmongOthers(t *testing.T) {
	for name, tt := range map[string]struct {
		takes     time.Duration
		slow, few int
	}{
		"slow handler": {10 * time.Second, 300, 20},
		"fast handler": {10 * time.Millisecond, 2000, 100},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) { putsOffAmongOthers(t, tt.takes, tt.slow, tt.few) })
		})
	}
}

func putsOffAmongOthers(t *testing.T, takes time.Duration, slow, few int) {
	t.Helper()
	meter := &metrictest.Recorder{}
	got := &recorder{fail: func(_ context.Context, m *inbox.Message) error {
		if m.Name == "slow" {
			time.Sleep(takes)
		}
		return nil
	}}
	b := newBench(t, limited{got}, engine.Config{ConsumerConfig: inbox.ConsumerConfig{MeterProvider: meter, Retry: driver.RetryDefaults(inbox.RetryPolicy{})}}, memqueue.Options{})
	b.put("quick", 1)
	b.put("slow", slow)
	b.put("quick", 1)
	b.start()
	passed := func() (n int) {
		for _, m := range got.messages() {
			if m.Name == "quick" {
				n++
			}
		}
		return n
	}
	eventually(t, "the quick ones have passed", func() bool { return passed() == 2 })
	if n := len(got.messages()); n > few {
		t.Errorf("the last one came after %d slow ones", n)
	}
	b.idle()
	b.stop()
	if retried, putOff := settledAs(meter, "retried"), settledAs(meter, "put_off"); retried != 0 || putOff == 0 {
		t.Errorf("%v are retried and %v put off", retried, putOff)
	}
	for _, m := range got.messages() {
		if m.Attempt != 1 {
			t.Errorf("attempt %d", m.Attempt)
		}
	}
}

// A message that a Waiter puts off for a short time waits in flight.
func TestPostpone_waitsInFlight(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var busy atomic.Bool
		busy.Store(true)
		got := &recorder{fail: func(context.Context, *inbox.Message) error {
			if busy.Load() {
				return inbox.Postpone(errors.New("no turn yet"), 2*time.Second)
			}
			return nil
		}}
		b := newBench(t, got, engine.Config{}, memqueue.Options{})
		b.put("mail", 20)
		b.start()
		time.Sleep(time.Second)
		if stats, err := b.consumer.Stats(t.Context()); err != nil || stats.PutOff+stats.Retrying+stats.Waiting != 0 {
			t.Errorf("%+v, %v", stats, err)
		}
		busy.Store(false)
		b.idle()
		b.stop()
		for _, m := range got.messages() {
			if m.Attempt != 1 || m.Redelivered {
				t.Errorf("%+v", m)
			}
		}
	})
}

// settledAs is how many deliveries were settled with an outcome.
func settledAs(meter *metrictest.Recorder, outcome string) (n float64) {
	for _, of := range []string{"consumer=orders,outcome=" + outcome, "class=default,consumer=orders,outcome=" + outcome} {
		for _, sum := range meter.Values("holdfast.inbox.test.settled{" + of + ",queue=orders}") {
			n += sum
		}
	}
	return n
}

// Run rejects settings that cannot work with the processor, and names them.
func TestRun_refusesSettingsThatCannotWork(t *testing.T) {
	t.Parallel()
	typo := inbox.NewMux()
	noError(t, typo.Register("mail", func(context.Context, *inbox.Message) error { return nil }), typo.SetLimit("mial", 2))
	every := inbox.NewMux()
	every.Fallback(func(context.Context, *inbox.Message) error { return nil })
	noError(t, every.SetLimit("mail", 2))
	short := withLedger{inbox.NewMux(), memory.NewLedger()}
	for name, tt := range map[string]struct {
		processor inbox.Processor
		retry     inbox.RetryPolicy
		want      string // empty: it runs
	}{
		"limit of no handler":       {processor: typo, want: `SetLimit names "mial"`},
		"limit for the fallback":    {processor: every},
		"retries outlast memory":    {short, inbox.RetryPolicy{MaxAge: 5 * 24 * time.Hour}, "MaxAge 120h0m0s"},
		"retries do not outlast":    {short, inbox.RetryPolicy{MaxAge: 24 * time.Hour}, ""},
		"memory that has no ledger": {inbox.NewMux(), inbox.RetryPolicy{MaxAge: 5 * 24 * time.Hour}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				b := newBench(t, tt.processor, engine.Config{ConsumerConfig: inbox.ConsumerConfig{Retry: tt.retry}}, memqueue.Options{})
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				err := b.consumer.Run(ctx)
				if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
					t.Errorf("Run returns %v, want %q", err, tt.want)
				}
			})
		})
	}
}
