package conformance

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// full returns a message with all fields that a sender can set.
func full() *inbox.Message {
	m := named("order.placed")
	m.Body, m.ContentType, m.Key = []byte(`{"n":"ü\u0000"}`), "application/json; charset=utf-8", "customer-7"
	m.Headers = map[string]string{
		"tenant": "a", "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "holdfast-tenant": "ü",
		"x-tenant": "b", "x-request-id": "7", "X-Upper": "c", "x-delay": "5000", "x-match": "any", "reply-to": "d", "!#$%&'*+.^_`|~": "e", "empty": "",
	}
	m.ContentEncoding, m.CorrelationID, m.ReplyTo = "utf-8", "call-7", "answers"
	m.PublishedAt = time.Unix(1_700_000_000, 0)
	return m
}

// sameEnvelope reports whether two messages have the same sender's fields.
func sameEnvelope(a, b *inbox.Message) bool {
	return a.ID == b.ID && a.Name == b.Name && bytes.Equal(a.Body, b.Body) && a.ContentType == b.ContentType && a.Key == b.Key &&
		a.ContentEncoding == b.ContentEncoding && a.CorrelationID == b.CorrelationID && a.ReplyTo == b.ReplyTo &&
		maps.Equal(a.Headers, b.Headers) && a.PublishedAt.Equal(b.PublishedAt)
}

func wantEnvelope(t *testing.T, got, want *inbox.Message) {
	t.Helper()
	if !sameEnvelope(got, want) {
		t.Errorf("message %.2000s, want %.2000s", fmt.Sprintf("%+v", got), fmt.Sprintf("%+v", want))
	}
}

func testSourceEnvelope(t *testing.T, f SourceFixture) {
	want := full()
	f.Publish(t, want)
	s := begin(t, running(t, f), 10)
	d := take(t, s, 1)[0]
	m := d.Message()
	wantEnvelope(t, m, want)
	if m.Attempt != 1 || m.Recovered != 0 || m.Replays != 0 || m.Redelivered || !m.FirstFailedAt.IsZero() || len(m.History) != 0 || m.Queue == "" {
		t.Errorf("first delivery %+v", m)
	}
	if d.Message() != m {
		t.Error("Message returns another one each time")
	}
	acked(t, s, d)
	ended(t, s)
}

// The window counts messages delivered since the last Start, and is never exceeded.
func testSourceWindow(t *testing.T, f SourceFixture) {
	all := numbered(t, f, 20)
	s := begin(t, running(t, f), 10)
	first := take(t, s, 10)
	wantNothing(t, s)
	acked(t, s, first[1])
	second := take(t, s, 1)
	wantNothing(t, s)
	acked(t, s, first[3], first[4])
	second = append(second, take(t, s, 2)...)
	wantNothing(t, s)
	wantNames(t, append(first, second...), all[:13])
	noError(t, s.Stop(t.Context()))
	noError(t, s.Start(t.Context(), 1))
	third := take(t, s, 1)
	wantNothing(t, s)
	acked(t, s, first[0], first[2]) // delivered before: they make no room
	wantNothing(t, s)
	acked(t, s, append(append(first[5:], second...), third...)...)
	seen := map[string]bool{}
	for len(seen) < 6 {
		ds := take(t, s, 1)
		seen[ds[0].Message().Name] = true
		acked(t, s, ds...)
	}
	wantNothing(t, s)
	ended(t, s)
}

func testSourceReceiveEnds(t *testing.T, f SourceFixture) {
	s := begin(t, running(t, f), 5)
	ctx, cancel := context.WithTimeout(t.Context(), quiet)
	defer cancel()
	if ds, err := s.Receive(ctx, 5); len(ds) != 0 || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%d messages, error %v", len(ds), err)
	}
	numbered(t, f, 1) // the session continues
	acked(t, s, take(t, s, 1)...)
	ended(t, s)
}

// Acknowledgements in any order settle those messages and no others.
func testSourceAcks(t *testing.T, f SourceFixture) {
	const n, window = 60, 20
	left := map[string]bool{}
	for _, m := range numbered(t, f, n) {
		left[m.Name] = true
	}
	source := running(t, f)
	again := map[string]int{}
	settle := func(s driver.Session, ds []driver.Delivery) {
		for _, name := range names(ds) {
			if again[name]++; !left[name] && (!f.Forgetful || again[name] > 3) {
				t.Fatalf("%s is redelivered after its acknowledgement", name)
			}
			delete(left, name)
		}
		for len(ds) > 0 {
			k := 1 + rand.IntN(len(ds))
			acked(t, s, ds[:k]...)
			ds = ds[k:]
		}
	}
	for round := 0; len(left) > 0; round++ {
		if round > 50 {
			t.Fatalf("%d messages are left after %d sessions", len(left), round)
		}
		s := begin(t, source, window)
		ds := take(t, s, min(window, len(left)))
		rand.Shuffle(len(ds), func(i, j int) { ds[i], ds[j] = ds[j], ds[i] })
		settle(s, ds[:(len(ds)+1)/2])
		ended(t, s)
	}
	s := begin(t, source, window)
	for more := true; more; {
		ctx, cancel := context.WithTimeout(t.Context(), quiet)
		ds, err := s.Receive(ctx, window)
		cancel()
		if err != nil && !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		settle(s, ds)
		more = err == nil
	}
	ended(t, s)
}

// However often a message is requeued, it is redelivered unchanged.
func testSourceGiveBack(t *testing.T, f SourceFixture) {
	want := full()
	f.Publish(t, want)
	s := begin(t, running(t, f), 3)
	for i := range 25 { // more than RabbitMQ's usual limit of deliveries
		ds := take(t, s, 1)
		m := ds[0].Message()
		wantEnvelope(t, m, want)
		if m.Attempt != 1 || len(m.History) != 0 || m.Redelivered != (i > 0) {
			t.Fatalf("delivery %d: %+v", i+1, m)
		}
		noError(t, s.GiveBack(t.Context(), ds))
	}
	acked(t, s, take(t, s, 1)...)
	wantNothing(t, s)
	ended(t, s)
}

// Messages that are unsettled when a session closes are redelivered, in order if the source guarantees that.
func testSourceClose(t *testing.T, f SourceFixture) {
	all := numbered(t, f, 30)
	source := running(t, f)
	s := begin(t, source, 20)
	ds := take(t, s, 20)
	acked(t, s, ds[4], ds[9])
	ended(t, s)
	for range 2 { // twice in quick succession
		s = begin(t, source, 50)
		take(t, s, 3)
		noError(t, s.Close(t.Context()))
	}
	s = begin(t, source, 50)
	var want []*inbox.Message
	for i, m := range all {
		if i != 4 && i != 9 {
			want = append(want, m)
		}
	}
	var got []driver.Delivery
	for len(got) < len(want) {
		d := take(t, s, 1)[0]
		m := d.Message()
		if !slices.ContainsFunc(want, func(w *inbox.Message) bool { return w.ID == m.ID }) {
			if !f.Forgetful {
				t.Errorf("%s is redelivered after its acknowledgement", m.Name)
			}
			acked(t, s, d)
			continue
		}
		if early := slices.ContainsFunc(all[:20], func(a *inbox.Message) bool { return a.ID == m.ID }); early && !m.Redelivered {
			t.Errorf("%s is not redelivered", m.Name)
		}
		if m.Attempt != 1 {
			t.Errorf("%s has the attempt %d", m.Name, m.Attempt)
		}
		got = append(got, d)
	}
	if source.Traits().Exclusive {
		wantNames(t, got, want)
	}
	seen := map[uuid.UUID]bool{}
	for _, d := range got {
		seen[d.Message().ID] = true
	}
	if len(seen) != len(want) {
		t.Errorf("%d of %d messages", len(seen), len(want))
	}
	if !f.Forgetful {
		wantNothing(t, s)
	}
	acked(t, s, got...)
	ended(t, s)
}

// A delivery of an ended session settles nothing in a later one.
func testSourceStale(t *testing.T, f SourceFixture) {
	numbered(t, f, 3)
	source := running(t, f)
	old := begin(t, source, 3)
	stale := take(t, old, 3)
	noError(t, old.Close(t.Context()))
	s := begin(t, source, 3)
	ds := take(t, s, 3)
	for what, err := range map[string]error{
		"Ack of the old session":      old.Ack(t.Context(), stale, false),
		"Ack of the new one":          s.Ack(t.Context(), stale, false),
		"GiveBack of the old session": old.GiveBack(t.Context(), stale),
	} {
		if !errors.Is(err, driver.ErrStale) {
			t.Errorf("%s: %v, want ErrStale", what, err)
		}
	}
	if _, err := old.Receive(t.Context(), 1); err == nil {
		t.Error("a closed session delivers")
	}
	wantNothing(t, s) // the window is still full
	noError(t, s.Close(t.Context()))
	s = begin(t, source, 3)
	again := take(t, s, 3)
	if len(again) != len(ds) {
		t.Errorf("%d of 3 messages", len(again))
	}
	acked(t, s, again...)
	ended(t, s)
}

// However often a session is stopped and started while messages arrive, each arrives once, and none while it
// is stopped.
func testSourceStop(t *testing.T, f SourceFixture) {
	const n = 120
	source := running(t, f)
	s := begin(t, source, 10)
	var sender sync.WaitGroup
	sender.Go(func() {
		for range n / 10 {
			numbered(t, f, 10)
		}
	})
	defer sender.Wait()
	seen := map[uuid.UUID]int{}
	for round := 0; len(seen) < n; round++ {
		ds := take(t, s, 1+rand.IntN(min(10, n-len(seen))))
		for _, d := range ds {
			seen[d.Message().ID]++
		}
		if round%3 != 0 {
			acked(t, s, ds...)
			continue
		}
		noError(t, s.Stop(t.Context()))
		if round%12 == 0 {
			wantNothing(t, s)
		}
		acked(t, s, ds...)
		noError(t, s.Start(t.Context(), 10))
	}
	wantNothing(t, s)
	for id, times := range seen {
		if times != 1 {
			t.Errorf("%s came %d times", id, times)
		}
	}
	ended(t, s)
}

// Four processes take turns: none gets a message of a key before earlier messages of the key are settled.
func testSourceHandOver(t *testing.T, f SourceFixture) {
	if !f.New(t).Traits().Exclusive {
		t.Skip("it serves several sessions at once")
	}
	const keys, each = 4, 20
	var all []*inbox.Message
	number := map[uuid.UUID]int{}
	for i := range keys * each {
		m := named("m")
		m.Key = fmt.Sprint(i % keys)
		number[m.ID] = i / keys
		all = append(all, m)
	}
	f.Publish(t, all...)
	var mu sync.Mutex
	next := map[string]int{} // the next number of each key
	left := func() int {
		mu.Lock()
		defer mu.Unlock()
		done := 0
		for _, n := range next {
			done += n
		}
		return len(all) - done
	}
	settled := func(ds []driver.Delivery) {
		mu.Lock()
		defer mu.Unlock()
		for _, d := range ds {
			m := d.Message()
			if number[m.ID] > next[m.Key] {
				t.Errorf("number %d of key %s while %d is due", number[m.ID], m.Key, next[m.Key])
			}
			next[m.Key] = max(next[m.Key], number[m.ID]+1)
		}
	}
	turn := func(source driver.Source) error {
		s, err := source.Open(t.Context())
		if err != nil {
			return err
		}
		defer func() { _ = s.Close(context.WithoutCancel(t.Context())) }()
		if err := s.Start(t.Context(), 20); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		for more := rand.IntN(4); more >= 0; more-- {
			ds, err := s.Receive(ctx, 20)
			if errors.Is(err, context.DeadlineExceeded) {
				return nil
			}
			if err != nil {
				return err
			}
			if more == 0 {
				ds = ds[:rand.IntN(len(ds)+1)] // the rest is requeued
			}
			settled(ds)
			if err := s.Ack(t.Context(), ds, false); err != nil {
				return err
			}
		}
		return nil
	}
	var processes sync.WaitGroup
	deadline := time.Now().Add(patience)
	for range 4 {
		source := running(t, f)
		processes.Go(func() {
			for left() > 0 && time.Now().Before(deadline) {
				if err := turn(source); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	processes.Wait()
	if n := left(); n > 0 {
		t.Errorf("%d messages are left", n)
	}
}

// A missing queue is ErrMissing, and a queue that is created later is served.
func testSourceMissing(t *testing.T, f SourceFixture) {
	if f.Delete == nil {
		t.Skip("the queue cannot be deleted")
	}
	source := running(t, f)
	s := begin(t, source, 5)
	numbered(t, f, 1)
	acked(t, s, take(t, s, 1)...)
	declare := f.Delete(t)
	await(t, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		if _, err := s.Receive(ctx, 1); err == nil || ctx.Err() != nil {
			return fmt.Errorf("the session of a deleted queue continues: %w", errors.Join(err, errors.New("no end")))
		}
		return nil
	})
	_ = s.Close(t.Context()) // it may return the error that ended the session
	if err := deliver(t, source); !errors.Is(err, driver.ErrMissing) {
		t.Errorf("without its queue: %v, want ErrMissing", err)
	}
	declare()
	numbered(t, f, 1)
	s = begin(t, source, 5)
	acked(t, s, take(t, s, 1)...)
	ended(t, s)
}

// deliver opens a session, receives a message and closes the session.
func deliver(t *testing.T, source driver.Source) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	s, err := source.Open(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = s.Close(context.WithoutCancel(ctx)) }()
	if err := s.Start(ctx, 1); err != nil {
		return err
	}
	_, err = s.Receive(ctx, 1)
	return err
}

// Run ends soon after its context, and Ready reports whether moves work.
func testSourceRun(t *testing.T, f SourceFixture) {
	source := f.New(t)
	if err := source.Ready(t.Context()); err == nil {
		t.Error("ready before Run")
	}
	for range 2 {
		ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
		over := make(chan struct{})
		go func() {
			defer close(over)
			source.Run(ctx)
		}()
		await(t, func() error { return source.Ready(t.Context()) })
		stop()
		<-over
		await(t, func() error {
			if source.Ready(t.Context()) == nil {
				return errors.New("ready after Run")
			}
			return nil
		})
	}
}
