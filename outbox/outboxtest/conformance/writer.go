package conformance

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"go.opentelemetry.io/otel/trace"

	"github.com/holdfast-go/holdfast/internal/outbox/stored"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// TestWriter checks the guarantees of a writer.
func TestWriter(t *testing.T, b Backend) {
	for name, fn := range map[string]func(*testing.T, Store){
		"a commit stores, a rollback does not":         commitAndRollback,
		"a message is stored whole":                    storesWhole,
		"id and content type are filled in":            fillsIn,
		"the trace context is stored":                  storesTrace,
		"a bad message is refused and nothing written": refusesBad,
		"an id is stored once":                         refusesDuplicate,
		"a message waits until its NotBefore":          waitsUntilNotBefore,
		"a key is written once":                        writesOnce,
		"of concurrent writers one is first":           oneIsFirst,
		"an empty call does nothing":                   func(t *testing.T, s Store) { s.write(t); s.wantReady(t) },
	} {
		each(t, b.Bubble, name, func(t *testing.T) { fn(t, b.Open(t)) })
	}
}

func commitAndRollback(t *testing.T, s Store) {
	sentinel := errors.New("business error")
	err := s.InTx(t.Context(), func(write func(...outbox.Message) error) error {
		return errors.Join(write(message("k", "never"), message("", "never")), sentinel)
	})
	if !errors.Is(err, sentinel) {
		t.Errorf("the transaction returned %v", err)
	}
	s.write(t, message("k", "1"), message("", "2"))
	s.wantReady(t, quoted("1", "2")...)
}

func storesWhole(t *testing.T, s Store) {
	m, err := outbox.NewMessage("order.placed.v2", map[string]string{"ü": "\x00\t\"'"})
	must(t, err)
	m.Headers = map[string]string{"tenant": `a "quoted", {braced} ünïcode`}
	m.Key, m.Transport = `k'{},"`, "audit"
	m.Route = outbox.Route{Exchange: "ex", RoutingKey: "a.b", Headers: map[string]string{"h": "v"}}
	raw := outbox.Message{Name: "blob", ContentType: "application/octet-stream", Body: []byte{0, 255, '\\', '\''}}
	s.write(t, m, raw)
	got := map[string]driver.Message{}
	for b := s.claim(t, driver.Claim{}); len(b.Messages) > 0; b = s.claim(t, driver.Claim{}) {
		for _, m := range b.Messages {
			got[m.Name] = m
		}
	}
	g := got[m.Name]
	if g.CreatedAt.IsZero() || g.Attempts != 0 {
		t.Errorf("state of a new message: %+v", g)
	}
	if g := stored.Message(g); fmt.Sprintf("%+v", g) != fmt.Sprintf("%+v", m) {
		t.Errorf("stored as\n%+v, was\n%+v", g, m)
	}
	if g := got["blob"]; string(g.Body) != string(raw.Body) || g.ContentType != raw.ContentType {
		t.Errorf("stored as %+v, was %+v", g, raw)
	}
}

func fillsIn(t *testing.T, s Store) {
	s.write(t, message("k", "1"))
	m := s.claim(t, driver.Claim{}).Messages[0]
	if m.ID.Version() != 7 || m.ContentType != "application/json" {
		t.Errorf("stored with id %s and content type %q", m.ID, m.ContentType)
	}
}

func storesTrace(t *testing.T, s Store) {
	span := trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{1}, SpanID: trace.SpanID{2}})
	must(t, s.tryWrite(trace.ContextWithSpanContext(t.Context(), span), message("k", "1")))
	m := s.claim(t, driver.Claim{}).Messages[0]
	if want := "00-01000000000000000000000000000000-0200000000000000-00"; m.Headers["traceparent"] != want {
		t.Errorf("headers %v", m.Headers)
	}
}

func refusesBad(t *testing.T, s Store) {
	bad := message("k", "bad")
	bad.Name = "Order Placed"
	err := s.InTx(t.Context(), func(write func(...outbox.Message) error) error {
		err := write(message("k", "good"), bad)
		var refused *outbox.MessageError
		if !errors.As(err, &refused) || refused.Index != 1 || refused.Field != "Name" {
			return fmt.Errorf("returned %v", err)
		}
		return write(message("k", "later")) // the transaction is still good
	})
	must(t, err)
	s.wantReady(t, quoted("later")...)
}

// A message with a NotBefore holds back the later messages of its key, and no others.
func waitsUntilNotBefore(t *testing.T, s Store) {
	later, past := message("k", "2"), message("", "4")
	later.NotBefore = time.Now().Add(long)
	past.NotBefore = time.Now().Add(-time.Hour)
	s.write(t, message("k", "1"), later, message("k", "3"), past)
	s.write(t, message("j", "5"))
	s.wantReady(t, quoted("1", "4", "5")...)
	first := s.claim(t, driver.Claim{})
	if first.Due <= 0 || first.Due > long {
		t.Errorf("the next message is due in %v, want at most %v", first.Due, long)
	}
	s.settle(t, first, outcomes(driver.Published, first.Messages...)...)

	soon := message("s", "6")
	soon.NotBefore = time.Now().Add(short)
	s.write(t, soon, message("s", "7"))
	alone := message("", "8")
	alone.NotBefore = time.Now().Add(short)
	s.write(t, alone) // one by one, as many in one call
	var got []string
	eventually(t, func() string {
		b := s.claim(t, driver.Claim{})
		s.settle(t, b, outcomes(driver.Published, b.Messages...)...)
		for _, m := range b.Messages {
			if !m.NotBefore.IsZero() {
				t.Errorf("the relay received NotBefore %v", m.NotBefore)
			}
			got = append(got, string(m.Body))
		}
		if len(got) < 3 {
			return "the delayed messages are not ready"
		}
		return ""
	})
	if slices.Index(got, `"6"`) > slices.Index(got, `"7"`) || len(got) != 3 || !slices.Contains(got, `"8"`) {
		t.Errorf("claimed %v, want 6, 7 in this order, and 8", got)
	}
}

func writesOnce(t *testing.T, s Store) {
	if s.OnceInTx == nil {
		t.Skip("the writer has no WriteOnce")
	}
	sentinel := errors.New("business error")
	var lost, kept uuid.UUID
	err := s.OnceInTx(t.Context(), func(once Once) (err error) {
		lost, _, err = once("a", message("k", "rolled back"))
		return errors.Join(err, sentinel)
	})
	if !errors.Is(err, sentinel) {
		t.Errorf("the transaction returned %v", err)
	}
	err = s.OnceInTx(t.Context(), func(once Once) error {
		id, first, err := once("a", message("k", "1"))
		kept = id
		again, second, err2 := once("a", message("k", "in the same transaction"))
		if !first || second || id == lost || again != id {
			t.Errorf("id %s first %v, then %s %v", id, first, again, second)
		}
		return errors.Join(err, err2)
	})
	must(t, err)
	b := s.claim(t, driver.Claim{})
	s.settle(t, b, outcomes(driver.Published, b.Messages...)...) // the key stays stored
	err = s.OnceInTx(t.Context(), func(once Once) error {
		again := message("k", "again")
		again.ID = kept
		id, first, err := once("a", again)
		if id != kept || first {
			t.Errorf("a second time: %s %v, want %s", id, first, kept)
		}
		refusesBadOnce(t, once)
		_, first, err2 := once("b", message("k", "2")) // the transaction is still good
		if !first {
			t.Error("another key is not first")
		}
		return errors.Join(err, err2)
	})
	must(t, err)
	s.wantReady(t, quoted("2")...)
}

func refusesBadOnce(t *testing.T, once Once) {
	bad := message("k", "bad")
	bad.Name = "Bad Name"
	var refused *outbox.MessageError
	if _, _, err := once("c", bad); !errors.As(err, &refused) || refused.Field != "Name" {
		t.Errorf("a bad message: %v", err)
	}
	for _, key := range []string{"", strings.Repeat("x", 256), "a\x00", "\xff"} {
		if _, _, err := once(key, message("k", "x")); !errors.As(err, &refused) || refused.Field != "DedupKey" {
			t.Errorf("key %q: %v", key, err)
		}
	}
}

func oneIsFirst(t *testing.T, s Store) {
	if s.OnceInTx == nil {
		t.Skip("the writer has no WriteOnce")
	}
	var mu sync.Mutex
	ids, firsts := map[uuid.UUID]bool{}, 0
	var wg sync.WaitGroup
	for range 5 {
		wg.Go(func() {
			var id uuid.UUID
			var first bool
			err := s.OnceInTx(t.Context(), func(once Once) (err error) {
				id, first, err = once("key", message("k", "1"))
				return err
			})
			mu.Lock()
			defer mu.Unlock()
			if ids[id] = true; first {
				firsts++
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if len(ids) != 1 || firsts != 1 {
		t.Errorf("ids %v, %d were first", ids, firsts)
	}
	s.wantReady(t, quoted("1")...)
}

func refusesDuplicate(t *testing.T, s Store) {
	m, err := outbox.NewMessage("order.placed", "1")
	must(t, err)
	s.write(t, m)
	again := m
	again.Body = []byte(`"2"`)
	err = s.tryWrite(t.Context(), message("k", "beside it"), again)
	var state interface{ SQLState() string }
	if !errors.As(err, &state) || state.SQLState() != "23505" {
		t.Errorf("the second write returned %v", err)
	}
	s.wantReady(t, quoted("1")...)
}

// measures follows messages through the states that driver.Depth counts.
func measures(t *testing.T, s Store) {
	source, ok := s.Source.(driver.Measured)
	if !ok {
		return
	}
	wants := func(when string, ready, parked, dead int, aged bool) {
		t.Helper()
		got, err := source.Depth(t.Context())
		if err != nil {
			t.Fatalf("Stats: %v", err)
		}
		if got.Ready != ready || got.Parked != parked || got.Dead != dead || got.OldestAge > 0 != aged || got.OldestAge > time.Hour {
			t.Errorf("%s: %+v, want %d ready, %d parked, %d dead, aged %v", when, got, ready, parked, dead, aged)
		}
	}
	wants("empty", 0, 0, 0, false)
	later := message("later", "x")
	later.NotBefore = time.Now().Add(time.Hour)
	s.write(t, later)
	time.Sleep(time.Millisecond)
	wants("for later", 0, 1, 0, false)

	s.write(t, message("a", "1"), message("a", "2"), message("b", "3"))
	time.Sleep(time.Millisecond)
	wants("written", 3, 1, 0, true)
	claimed := s.claim(t, driver.Claim{})
	wants("claimed", 3, 1, 0, true)
	if got, err := source.Depth(t.Context()); err != nil || got.Stored < 4 || got.Leased != len(claimed.Leases) || got.Doubtful != 0 {
		t.Errorf("%+v, %v, want at least 4 stored and %d lanes leased", got, err, len(claimed.Leases))
	}
	first := claimed.Messages[0]
	failed := outcomes(driver.Failed, first)
	failed[0].Delay = time.Minute
	s.settle(t, claimed, failed...)
	wants("one failed", 2, 2, 0, true)
	dead := s.claim(t, driver.Claim{})
	s.settle(t, dead, outcomes(driver.Dead, dead.Messages...)...)
	n := int(len(dead.Messages)) // the message behind the failed one was not claimed
	wants("the others dead", 2-n, 2, n, true)
}

// Messages behind a message for later count for the oldest age, so that an alert on the age includes them.
func measuresHeldMessages(t *testing.T, s Store) {
	source, ok := s.Source.(driver.Measured)
	if !ok {
		return
	}
	later := message("k", "1")
	later.NotBefore = time.Now().Add(time.Hour)
	s.write(t, later)
	s.write(t, message("k", "2"), message("k", "3"))
	time.Sleep(time.Millisecond)
	for _, when := range []string{"before a claim", "after a claim"} {
		stats, err := source.Depth(t.Context())
		must(t, err)
		if stats.Ready != 2 || stats.Parked != 1 || stats.OldestAge <= 0 || stats.OldestAge > 30*time.Minute {
			t.Errorf("%s: %+v", when, stats)
		}
		s.wantReady(t)
	}
}

// A pause lets claimed messages finish and keeps the others, until Resume. Sources that cannot be paused pass.
func pauses(t *testing.T, s Store) {
	p, ok := s.Source.(driver.Pausable)
	if !ok {
		return
	}
	s.write(t, message("k", "1"), message("k", "2"))
	claimed := s.claim(t, driver.Claim{Limit: 1})
	began := time.Now()
	for _, reason := range []string{"", "the consumer is down"} {
		must(t, p.Pause(t.Context(), "ada", reason))
		wantPause(t, p, driver.Pause{By: "ada", Reason: reason})
	}
	s.settle(t, claimed, outcomes(driver.Published, claimed.Messages...)...)
	s.write(t, message("", "3"))
	if b := s.claim(t, driver.Claim{}); len(b.Messages) > 0 || b.More {
		t.Errorf("claimed %v in a pause, more %v", bodies(b), b.More)
	}
	if state, err := p.Paused(t.Context()); err != nil || state.Since.Sub(began).Abs() > time.Minute {
		t.Errorf("paused since %v, which began at %v: %v", state.Since, began, err)
	}
	for _, wrong := range [][2]string{{"", "x"}, {"a\nb", "x"}, {strings.Repeat("a", 129), "x"}, {"\xff", "x"}, {"a", strings.Repeat("x", 1001)}} {
		if err := p.Pause(t.Context(), wrong[0], wrong[1]); err == nil {
			t.Errorf("paused by %.20q for %.20q", wrong[0], wrong[1])
		}
	}
	for range 2 {
		must(t, p.Resume(t.Context()))
		wantPause(t, p, driver.Pause{})
	}
	s.wantReady(t, quoted("2", "3")...)
}

func wantPause(t *testing.T, p driver.Pausable, want driver.Pause) {
	t.Helper()
	state, err := p.Paused(t.Context())
	if err != nil || state.By != want.By || state.Reason != want.Reason || state.Since.IsZero() != (want.By == "") {
		t.Errorf("paused %+v, %v, want %+v", state, err, want)
	}
}
