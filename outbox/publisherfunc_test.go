package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxtest/conformance"
)

// destination is the destination of the test functions.
type destination struct {
	mu       sync.Mutex
	messages []driver.Message
	calls    []int // the number of messages of each call
	running  int
	most     int // running at once
	down     bool
	time     time.Duration // of a call
}

func (d *destination) sendBatch(ctx context.Context, msgs []outbox.Message) []error {
	if n := d.enter(len(msgs)); n > 0 {
		defer d.leave()
	}
	select {
	case <-time.After(d.time): // timing: must pass, in a bubble
	case <-ctx.Done():
		return slices.Repeat([]error{ctx.Err()}, len(msgs))
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	errs := make([]error, len(msgs))
	for i, m := range msgs {
		switch {
		case d.down:
			errs[i] = failure(driver.Unavailable)
		case m.Name == "nobody.listens":
			errs[i] = failure(driver.Unroutable)
		default:
			d.messages = append(d.messages, driver.Message{ID: m.ID, Name: m.Name, Body: m.Body, ContentType: m.ContentType, Headers: m.Headers})
		}
	}
	return errs
}

func (d *destination) send(ctx context.Context, m outbox.Message) error {
	return d.sendBatch(ctx, []outbox.Message{m})[0]
}

func (d *destination) enter(n int) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.calls = append(d.calls, n)
	d.running++
	d.most = max(d.most, d.running)
	return d.running
}

func (d *destination) leave() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.running--
}

func (d *destination) received(context.Context) ([]driver.Message, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.messages), nil
}

func (d *destination) setDown(down bool) func() {
	return func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.down = down
	}
}

func TestPublisherFunc_conformance(t *testing.T) {
	for name, make := range map[string]func(d *destination) *outbox.PublisherFunc{
		"one":   func(d *destination) *outbox.PublisherFunc { return &outbox.PublisherFunc{Send: d.send} },
		"batch": func(d *destination) *outbox.PublisherFunc { return &outbox.PublisherFunc{SendBatch: d.sendBatch} },
	} {
		t.Run(name, func(t *testing.T) {
			conformance.TestPublisher(t, conformance.PublisherBackend{Bubble: true, Open: func(t *testing.T) conformance.PublisherCase {
				d := &destination{}
				return conformance.PublisherCase{
					Publisher: make(d), Received: d.received, Unroutable: conformance.NewMessage(t, "nobody.listens", 1),
					Break: d.setDown(true), Fix: d.setDown(false),
				}
			}})
		})
	}
}

func TestPublisherFunc_boundsItsCalls(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		d := &destination{time: 10 * time.Millisecond}
		b.between(b.store, &outbox.PublisherFunc{Send: d.send, Concurrency: 3}, outbox.RelayConfig{})
		for n := range 100 {
			b.write(message("", n))
		}
		begin := time.Now()
		b.drain(outbox.Bounds{})
		if took := time.Since(begin); len(d.messages) != 100 || d.most != 3 || took != 340*time.Millisecond {
			b.Errorf("%d messages, %d calls at once, %v", len(d.messages), d.most, took)
		}
	})
}

func TestPublisherFunc_fillsBatches(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		d := &destination{time: 10 * time.Millisecond}
		b.between(b.store, &outbox.PublisherFunc{SendBatch: d.sendBatch, BatchSize: 20}, outbox.RelayConfig{})
		for n := range 105 {
			b.write(message("", n))
		}
		b.drain(outbox.Bounds{})
		if len(d.messages) != 105 || slices.Max(d.calls) != 20 || len(d.calls) > 10 { // the relay claims it in two or three parts
			b.Errorf("%d messages in batches of %v", len(d.messages), d.calls)
		}
	})
}

// Messages of a key are in order and never in the same batch. A failure holds back the later messages of its key.
func TestPublisherFunc_keepsOrderOfKeys(t *testing.T) {
	inBubble(t, outbox.RelayConfig{Rand: half}, func(b *bench) {
		d := &destination{time: time.Millisecond}
		failed := false
		b.between(b.store, &outbox.PublisherFunc{SendBatch: func(ctx context.Context, msgs []outbox.Message) []error {
			keys := map[string]bool{}
			for i, m := range msgs {
				if keys[m.Key] {
					b.Errorf("two messages of key %s in a batch", m.Key)
				}
				keys[m.Key] = true
				if string(m.Body) == "3" && !failed {
					failed = true
					errs := d.sendBatch(ctx, slices.Delete(slices.Clone(msgs), i, i+1))
					return slices.Insert(errs, i, errors.New("not now"))
				}
			}
			return d.sendBatch(ctx, msgs)
		}}, outbox.RelayConfig{})
		for n := range 12 {
			b.write(message("k"+strconv.Itoa(n%3), n))
		}
		stop := b.start()
		time.Sleep(time.Minute)
		stop()
		of := map[int][]string{}
		for _, body := range bodies(d.messages) {
			n, _ := strconv.Atoi(body)
			of[n%3] = append(of[n%3], body)
		}
		if got := fmt.Sprint(of); got != "map[0:[0 3 6 9] 1:[1 4 7 10] 2:[2 5 8 11]]" {
			b.Error(got)
		}
	})
}

func TestPublisherFunc_failures(t *testing.T) {
	for name, tt := range map[string]struct {
		fn    func(ctx context.Context, msgs []outbox.Message) []error
		class driver.Class // of "1"; "": published
		text  string
	}{
		"nil": {func(context.Context, []outbox.Message) []error { return nil }, "", ""},
		"permanent": {func(_ context.Context, msgs []outbox.Message) []error {
			return failures(msgs, failure(driver.Permanent))
		}, driver.Permanent, "scripted"},
		"plain":   {func(_ context.Context, msgs []outbox.Message) []error { return failures(msgs, errors.New("no")) }, driver.Retryable, "no"},
		"too few": {func(context.Context, []outbox.Message) []error { return []error{nil} }, driver.Retryable, "1 errors for 3 messages"},
		"one for all": {func(_ context.Context, msgs []outbox.Message) []error { return []error{errors.New("no")} },
			driver.Retryable, "1 errors for 3 messages: no"},
		"one outage for all": {func(context.Context, []outbox.Message) []error { return []error{failure(driver.Unavailable)} },
			driver.Unavailable, "1 errors for 3 messages: outbox: publish: unavailable: scripted"},
		"one rejection for all": {func(context.Context, []outbox.Message) []error { return []error{failure(driver.Permanent)} },
			driver.Retryable, "1 errors for 3 messages"},
		"exit": {func(context.Context, []outbox.Message) []error { runtime.Goexit(); return nil }, driver.Retryable, "exited"},
		"panic": {func(_ context.Context, msgs []outbox.Message) []error {
			if failures(msgs, errors.ErrUnsupported) != nil {
				panic("boom")
			}
			return nil
		}, driver.Retryable, "the function panicked: boom"},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, outbox.RelayConfig{}, func(b *bench) {
				p := &outbox.PublisherFunc{SendBatch: tt.fn}
				answers := map[string]error{}
				for n := range 3 {
					m := driver.Message{Body: []byte(strconv.Itoa(n))}
					p.Publish(b.Context(), m, func(err error) { answers[string(m.Body)] = err })
				}
				time.Sleep(time.Second)
				synctest.Wait()
				if len(answers) != 3 {
					b.Fatalf("answers %v", answers)
				}
				err := answers["1"]
				switch {
				case tt.class == "" && err != nil:
					b.Error(err)
				case tt.class != "" && (err == nil || driver.ClassOf(err) != tt.class || !strings.Contains(err.Error(), tt.text)):
					b.Errorf("%v, want %s, %s", err, tt.class, tt.text)
				}
				innocent := !strings.Contains(tt.text, "for 3 messages") && name != "exit"
				if err := answers["0"]; innocent && err != nil {
					b.Errorf("another message of the batch: %v", err)
				}
			})
		})
	}
}

// failures returns err for the message with the body 1, or nil if that message is not included.
func failures(msgs []outbox.Message, err error) []error {
	errs := make([]error, len(msgs))
	i := slices.IndexFunc(msgs, func(m outbox.Message) bool { return string(m.Body) == "1" })
	if i < 0 {
		return nil
	}
	errs[i] = err
	return errs
}

// The log contains the stack of a panic, and only that message fails.
func TestPublisherFunc_logsPanics(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		d := &destination{}
		var out syncBuffer
		b.between(b.store, &outbox.PublisherFunc{Send: func(ctx context.Context, m outbox.Message) error {
			if string(m.Body) == "1" {
				panic("boom")
			}
			return d.send(ctx, m)
		}}, outbox.RelayConfig{Logger: slog.New(slog.NewTextHandler(&out, nil)), Retry: outbox.RetryPolicy{MaxAttempts: 1}})
		b.write(message("", 1), message("", 2))
		b.drain(outbox.Bounds{})
		if got := bodies(d.messages); len(b.dead()) != 1 || !slices.Equal(got, []string{"2"}) {
			b.Errorf("dead %v, published %v", b.dead(), got)
		}
		if text := out.String(); !strings.Contains(text, "panicked: boom") || !strings.Contains(text, "publisherfunc_test.go") {
			b.Error(text)
		}
	})
}

// A panic that only a batch causes is in the log, because no message fails.
func TestPublisherFunc_logsPanicsOfBatches(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		d := &destination{}
		var out syncBuffer
		b.between(b.store, &outbox.PublisherFunc{SendBatch: func(ctx context.Context, msgs []outbox.Message) []error {
			if len(msgs) > 1 {
				panic("boom")
			}
			return d.sendBatch(ctx, msgs)
		}}, outbox.RelayConfig{Logger: slog.New(slog.NewTextHandler(&out, nil))})
		b.write(message("", 1), message("", 2))
		b.drain(outbox.Bounds{})
		if text := out.String(); len(d.messages) != 2 || !strings.Contains(text, "panic=boom") || !strings.Contains(text, "publisherfunc_test.go") {
			b.Errorf("%d messages published, log: %s", len(d.messages), text)
		}
	})
}

// After a panic, messages that nobody waits for any more are not sent.
func TestPublisherFunc_panicsLate(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		var calls atomic.Int64
		p := &outbox.PublisherFunc{SendBatch: func(context.Context, []outbox.Message) []error {
			calls.Add(1)
			time.Sleep(2 * time.Second) // timing: in a bubble
			panic("boom")
		}}
		ctx, cancel := context.WithTimeout(b.Context(), time.Second)
		defer cancel()
		for range 3 {
			p.Publish(ctx, driver.Message{}, func(err error) {
				if driver.ClassOf(err) != driver.Unavailable {
					b.Error(err)
				}
			})
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if calls.Load() != 1 {
			b.Errorf("%d calls", calls.Load())
		}
	})
}

// broken is an error whose methods panic.
type broken struct{ cause error }

func (e *broken) Error() string { return e.cause.Error() }
func (e *broken) Unwrap() error { return e.cause }

// An error whose methods panic is a failure of its message. It does not end the process.
func TestPublisherFunc_brokenErrors(t *testing.T) {
	const want = "nil pointer dereference"
	for name, err := range map[string]error{
		"nil *PublishError":         (*driver.PublishError)(nil),
		"nil error of its own type": (*broken)(nil),
		"nil cause":                 fmt.Errorf("send: %w", &broken{}),
		"nil cause of a class":      &driver.PublishError{Class: driver.Permanent, Err: (*broken)(nil)},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, outbox.RelayConfig{}, func(b *bench) {
				p := &outbox.PublisherFunc{Send: func(context.Context, outbox.Message) error { return err }}
				b.between(b.store, p, outbox.RelayConfig{Retry: outbox.RetryPolicy{MaxAttempts: 1}})
				b.write(message("k", 1))
				report := b.drain(outbox.Bounds{})
				if dead := b.dead(); report.Failed != 1 || len(dead) != 1 || !strings.Contains(dead[0].Error, want) {
					b.Errorf("%+v, dead letters %+v", report, dead)
				}
			})
		})
	}
}

// The HTTP example loses no message to a redirect, and makes a dead letter only of what the endpoint rejects.
func TestPublisherFunc_exampleOfHTTP(t *testing.T) {
	t.Parallel()
	for code, want := range map[int]driver.Class{
		200: "", 204: "", 301: driver.Retryable, 302: driver.Retryable, 308: driver.Retryable, 400: driver.Permanent, 401: driver.Unavailable,
		404: driver.Unroutable, 408: driver.Retryable, 422: driver.Permanent, 429: driver.Unavailable, 500: driver.Retryable, 502: driver.Unavailable,
	} {
		endpoint := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodPost {
				w.Header().Set("Location", "/elsewhere")
				w.WriteHeader(code)
			}
		}))
		err := newWebhook(endpoint.URL).send(t.Context(), outbox.Message{Name: "a", Headers: map[string]string{"user/id": "1"}})
		if (err == nil) != (want == "") || err != nil && driver.ClassOf(err) != want {
			t.Errorf("status %d: %v, want %q", code, err, want)
		}
		endpoint.Close()
	}
}

// In the example of a cloud queue, no message fails because of another one.
func TestPublisherFunc_exampleOfQueue(t *testing.T) {
	t.Parallel()
	large := make([]byte, 600<<10)
	msgs := []outbox.Message{
		{ID: uuid.New(), Body: large},
		{ID: uuid.New(), Body: large, Key: "k"},
		{ID: uuid.New(), Body: make([]byte, 2<<20)},
		{ID: uuid.New(), Route: outbox.Route{Exchange: "missing"}},
	}
	client := &fakeQueue{}
	errs := cloudQueue{client: client, fallback: "orders.fifo"}.sendBatch(t.Context(), msgs)
	if errs[0] != nil || errs[1] != nil || driver.ClassOf(errs[2]) != driver.Permanent || driver.ClassOf(errs[3]) != driver.Unroutable {
		t.Error(errs)
	}
	if len(client.bodies) != 2 {
		t.Errorf("%d messages sent", len(client.bodies))
	}
}

// A call that ends because of its context costs no attempt, whatever it returns.
func TestPublisherFunc_timeout(t *testing.T) {
	for name, size := range map[string]int{"one": 0, "batch": 10} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, outbox.RelayConfig{}, func(b *bench) {
				slow := &destination{time: time.Hour}
				p := &outbox.PublisherFunc{Send: slow.send}
				if size > 0 {
					p = &outbox.PublisherFunc{SendBatch: slow.sendBatch, BatchSize: size}
				}
				b.between(b.store, p, outbox.RelayConfig{PublishTimeout: time.Second})
				b.write(message("", 1), message("", 2))
				stop := b.start()
				time.Sleep(time.Minute)
				if b.relay.Ready(b.Context()) == nil {
					b.Error("ready while the transport is paused")
				}
				stop()
				if left := b.store.Pending(); len(left) != 2 || left[0].Attempts+left[1].Attempts != 0 || slow.running != 0 {
					b.Errorf("left %+v, %d calls running", left, slow.running)
				}
			})
		})
	}
}

// The relay stops waiting for a function that ignores its context. The function still counts for Concurrency.
func TestPublisherFunc_ignoresItsContext(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		free := make(chan struct{})
		var calls, running atomic.Int64
		p := &outbox.PublisherFunc{Concurrency: 2, Send: func(context.Context, outbox.Message) error {
			calls.Add(1)
			running.Add(1)
			<-free
			running.Add(-1)
			return nil
		}}
		b.between(b.store, p, outbox.RelayConfig{PublishTimeout: time.Second, ShutdownTimeout: 5 * time.Second})
		for n := range 10 {
			b.write(message("", n))
		}
		stop := b.start()
		time.Sleep(time.Minute)
		if used, size := p.Window(); used != 2 || size != 2 || calls.Load() != 2 {
			b.Errorf("window %d of %d, %d calls", used, size, calls.Load())
		}
		begin := time.Now()
		stop()
		if took := time.Since(begin); took > 5*time.Second {
			b.Errorf("the shutdown took %v", took)
		}
		close(free)
		synctest.Wait()
		if used, _ := p.Window(); used != 0 || running.Load() != 0 {
			b.Errorf("window %d, %d calls run", used, running.Load())
		}
	})
}

// A shutdown waits for running calls.
func TestPublisherFunc_shutdown(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		d := &destination{time: 2 * time.Second}
		b.between(b.store, &outbox.PublisherFunc{Send: d.send}, outbox.RelayConfig{})
		b.write(message("", 1))
		stop := b.start()
		time.Sleep(time.Second)
		stop()
		if left := b.store.Pending(); len(left) != 0 || d.running != 0 || len(d.messages) != 1 {
			b.Errorf("left %+v, %d calls running, %d messages published", left, d.running, len(d.messages))
		}
	})
}

func TestPublisherFunc_rejectsBadFields(t *testing.T) {
	t.Parallel()
	send := (&destination{}).send
	for want, p := range map[string]*outbox.PublisherFunc{
		"set Send or SendBatch":      {},
		"not both":                   {Send: send, SendBatch: (&destination{}).sendBatch},
		"BatchSize is for SendBatch": {Send: send, BatchSize: 1},
		"BatchSize is -1":            {SendBatch: (&destination{}).sendBatch, BatchSize: -1},
		"Concurrency is -1":          {Send: send, Concurrency: -1},
		"BatchSize is 10001":         {SendBatch: (&destination{}).sendBatch, BatchSize: 10_001},
		"Concurrency is 9223":        {Send: send, Concurrency: math.MaxInt},
	} {
		_, err := outbox.NewRelay(nil, p, outbox.RelayConfig{Transports: map[string]driver.Publisher{"other": p}})
		if err == nil || strings.Count(err.Error(), want) != 2 || p.Ready(t.Context()) == nil {
			t.Errorf("%v, want %q twice", err, want)
		}
		p.Publish(t.Context(), driver.Message{}, func(err error) {
			if driver.ClassOf(err) != driver.Unavailable {
				t.Errorf("published with %q: %v", want, err)
			}
		})
	}
}

// The webhook of the example opens as many connections as it makes calls at once.
func TestExamplePublisherFunc_keepsConnections(t *testing.T) {
	t.Parallel()
	var opened atomic.Int64
	endpoint := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintln(w, `{"status": "accepted"}`)
	}))
	endpoint.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			opened.Add(1)
		}
	}
	endpoint.Start()
	t.Cleanup(endpoint.Close)
	hook := newWebhook(endpoint.URL)
	for range 20 {
		var calls sync.WaitGroup
		for range maxCalls {
			calls.Go(func() {
				if err := hook.send(t.Context(), outbox.Message{Name: "order.placed", ContentType: "application/json"}); err != nil {
					t.Error(err)
				}
			})
		}
		calls.Wait()
	}
	if n := opened.Load(); n > 2*maxCalls { // a dial goes on when another connection has become free
		t.Errorf("opened %d connections for %d calls at once", n, maxCalls)
	}
}
