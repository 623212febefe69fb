package conformance

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/holdfast-go/holdfast/outbox"
)

// Backend makes the stores under test.
type Backend struct {
	// Bubble says that a store can run in a testing/synctest bubble.
	Bubble bool
	// Open gives each case an empty store of its own.
	Open func(t *testing.T) Store
}

// Store is one store: a writer and the source that reads what it wrote.
type Store struct {
	Source outbox.Source
	// InTx calls fn with a write function bound to one transaction, commits when fn returns nil, and
	// else rolls back and returns fn's error. What commit itself refuses is returned too.
	InTx func(ctx context.Context, fn func(write func(...outbox.Message) error) error) error
	// Dead returns the dead letters, each with its attempts.
	Dead func(ctx context.Context) ([]outbox.Message, error)
}

const lease = time.Minute

func (s Store) write(t *testing.T, msgs ...outbox.Message) {
	t.Helper()
	if err := s.tryWrite(t.Context(), msgs...); err != nil {
		t.Fatalf("write: %v", err)
	}
}

func (s Store) tryWrite(ctx context.Context, msgs ...outbox.Message) error {
	return s.InTx(ctx, func(write func(...outbox.Message) error) error { return write(msgs...) })
}

func (s Store) claim(t *testing.T, req outbox.ClaimRequest) outbox.Batch {
	t.Helper()
	if req.Limit == 0 {
		req.Limit = 1000
	}
	if req.Lease == 0 {
		req.Lease = lease
	}
	b, err := s.Source.Claim(t.Context(), req)
	if err != nil {
		t.Fatalf("Claim: %v", err)
	}
	return b
}

func (s Store) settle(t *testing.T, b outbox.Batch, outcomes ...outbox.Outcome) []outbox.Lease {
	t.Helper()
	stale, err := s.Source.Settle(t.Context(), b, outcomes)
	if err != nil {
		t.Fatalf("Settle: %v", err)
	}
	return stale
}

// wantReady claims everything, compares the bodies in any order, and gives it back.
func (s Store) wantReady(t *testing.T, want ...string) {
	t.Helper()
	var got []string
	var batches []outbox.Batch
	for {
		b := s.claim(t, outbox.ClaimRequest{})
		batches = append(batches, b)
		if len(b.Messages) == 0 {
			break
		}
		got = append(got, bodies(b)...)
	}
	for _, b := range batches {
		s.settle(t, b)
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("ready are %v, want %v", got, want)
	}
}

func bodies(b outbox.Batch) []string {
	var got []string
	for _, m := range b.Messages {
		got = append(got, string(m.Body))
	}
	return got
}

func outcomes(v outbox.Verdict, msgs ...outbox.Message) []outbox.Outcome {
	var out []outbox.Outcome
	for _, m := range msgs {
		out = append(out, outbox.Outcome{ID: m.ID, Verdict: v, Class: outbox.Retryable, Err: "scripted"})
	}
	return out
}

func message(key, body string) outbox.Message {
	return outbox.Message{Name: "order.placed", Key: key, Body: []byte(`"` + body + `"`)}
}

func quoted(values ...string) []string {
	for i, v := range values {
		values[i] = strconv.Quote(v)
	}
	return values
}

// TestWriter checks what a writer promises.
func TestWriter(t *testing.T, b Backend) {
	for name, fn := range map[string]func(*testing.T, Store){
		"a commit stores, a rollback does not":         commitAndRollback,
		"a message is stored whole":                    storesWhole,
		"id and content type are filled in":            fillsIn,
		"the trace context is stored":                  storesTrace,
		"a bad message is refused and nothing written": refusesBad,
		"an id is stored once":                         refusesDuplicate,
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
	m, err := outbox.New("order.placed.v2", map[string]string{"ü": "\x00\t\"'"})
	if err != nil {
		t.Fatal(err)
	}
	m.Headers = map[string]string{"tenant": `a "quoted", {braced} ünïcode`}
	m.Key, m.Transport = `k'{},"`, "audit"
	m.Route = outbox.Route{Exchange: "ex", RoutingKey: "a.b", Headers: map[string]string{"h": "v"}}
	raw := outbox.Message{Name: "blob", ContentType: "application/octet-stream", Body: []byte{0, 255, '\\', '\''}}
	s.write(t, m, raw)
	got := map[string]outbox.Message{}
	for b := s.claim(t, outbox.ClaimRequest{}); len(b.Messages) > 0; b = s.claim(t, outbox.ClaimRequest{}) {
		for _, m := range b.Messages {
			got[m.Name] = m
		}
	}
	g := got[m.Name]
	if g.CreatedAt.IsZero() || !g.PublishedAt.IsZero() || g.Attempts != 0 {
		t.Errorf("state of a new message: %+v", g)
	}
	g.CreatedAt = m.CreatedAt
	if fmt.Sprintf("%+v", g) != fmt.Sprintf("%+v", m) {
		t.Errorf("stored as\n%+v, was\n%+v", g, m)
	}
	if g := got["blob"]; string(g.Body) != string(raw.Body) || g.ContentType != raw.ContentType {
		t.Errorf("stored as %+v, was %+v", g, raw)
	}
}

func fillsIn(t *testing.T, s Store) {
	s.write(t, message("k", "1"))
	m := s.claim(t, outbox.ClaimRequest{}).Messages[0]
	if m.ID.Version() != 7 || m.ContentType != outbox.ContentTypeJSON {
		t.Errorf("stored with id %s and content type %q", m.ID, m.ContentType)
	}
}

func storesTrace(t *testing.T, s Store) {
	span := trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{1}, SpanID: trace.SpanID{2}})
	if err := s.tryWrite(trace.ContextWithSpanContext(t.Context(), span), message("k", "1")); err != nil {
		t.Fatal(err)
	}
	m := s.claim(t, outbox.ClaimRequest{}).Messages[0]
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
			return fmt.Errorf("refused with %v", err)
		}
		return write(message("k", "later")) // the transaction is still good
	})
	if err != nil {
		t.Fatal(err)
	}
	s.wantReady(t, quoted("later")...)
}

func refusesDuplicate(t *testing.T, s Store) {
	m, err := outbox.New("order.placed", "1")
	if err != nil {
		t.Fatal(err)
	}
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

// TestSource checks the contract of outbox.Source.
func TestSource(t *testing.T, b Backend) {
	for name, fn := range map[string]func(*testing.T, Store){
		"an empty store gives an empty batch": func(t *testing.T, s Store) { s.wantReady(t) },
		"a key is in stored order":            keepsOrder,
		"a limit is kept":                     keepsLimit,
		"a leased lane is not claimed":        leasesExclude,
		"claims side by side share the work":  claimsSideBySide,
		"published messages are gone":         settlesPublished,
		"what has no outcome is given back":   givesBack,
		"a failed message waits with its key": parksFailed,
		"a dead message lets its key go on":   buriesDead,
		"a skipped transport is left alone":   skipsTransports,
		"a lease runs out and is fenced":      fencesStaleLease,
		"a batch is settled once":             settlesOnce,
		"foreign ids are ignored":             ignoresForeign,
		"bad requests are refused":            refusesBadRequests,
	} {
		each(t, b.Bubble, name, func(t *testing.T) { fn(t, b.Open(t)) })
	}
}

func keepsOrder(t *testing.T, s Store) {
	var want []string
	for i := range 50 {
		body := strconv.Itoa(i)
		want = append(want, strconv.Quote(body))
		s.write(t, message("k", body), message("", "x"))
	}
	var got []string
	for b := s.claim(t, outbox.ClaimRequest{}); len(b.Messages) > 0; b = s.claim(t, outbox.ClaimRequest{}) {
		for _, m := range b.Messages {
			if m.Key == "k" {
				got = append(got, string(m.Body))
			}
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("claimed as %v", got)
	}
}

func keepsLimit(t *testing.T, s Store) {
	for range 20 {
		s.write(t, message("k", "1"))
	}
	if n := len(s.claim(t, outbox.ClaimRequest{Limit: 3}).Messages); n == 0 || n > 3 {
		t.Errorf("%d messages for a limit of 3", n)
	}
}

func leasesExclude(t *testing.T, s Store) {
	s.write(t, message("k", "1"), message("k", "2"))
	first := s.claim(t, outbox.ClaimRequest{Limit: 1})
	s.write(t, message("k", "3"))
	if second := s.claim(t, outbox.ClaimRequest{}); len(second.Messages) > 0 {
		t.Errorf("claimed %v beside a lease", bodies(second))
	}
	s.settle(t, first, outcomes(outbox.Published, first.Messages...)...)
	s.wantReady(t, quoted("2", "3")...)
}

func claimsSideBySide(t *testing.T, s Store) {
	const n = 400
	var msgs []outbox.Message
	for i := range n {
		msgs = append(msgs, message("k"+strconv.Itoa(i), strconv.Itoa(i)))
	}
	s.write(t, msgs...)
	var mu sync.Mutex
	seen := map[string]int{}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for {
				b, err := s.Source.Claim(t.Context(), outbox.ClaimRequest{Limit: 20, Lease: lease})
				if err != nil {
					t.Errorf("Claim: %v", err)
					return
				}
				mu.Lock()
				for _, body := range bodies(b) {
					seen[body]++
				}
				done := len(seen) == n
				mu.Unlock()
				if stale, err := s.Source.Settle(t.Context(), b, outcomes(outbox.Published, b.Messages...)); err != nil || len(stale) > 0 {
					t.Errorf("Settle: stale %v, %v", stale, err)
					return
				}
				if done {
					return
				}
			}
		})
	}
	wg.Wait()
	for body, times := range seen {
		if times != 1 {
			t.Errorf("%s was claimed %d times", body, times)
		}
	}
	s.wantReady(t)
}

func settlesPublished(t *testing.T, s Store) {
	s.write(t, message("k", "1"), message("k", "2"))
	b := s.claim(t, outbox.ClaimRequest{})
	if stale := s.settle(t, b, outcomes(outbox.Published, b.Messages...)...); len(stale) > 0 {
		t.Errorf("stale: %v", stale)
	}
	s.wantReady(t)
}

func givesBack(t *testing.T, s Store) {
	s.write(t, message("k", "1"), message("k", "2"), message("k", "3"))
	b := s.claim(t, outbox.ClaimRequest{})
	s.settle(t, b, outcomes(outbox.Published, b.Messages[0])...)
	b = s.claim(t, outbox.ClaimRequest{})
	if got := bodies(b); !slices.Equal(got, quoted("2", "3")) || b.Messages[0].Attempts != 0 {
		t.Errorf("given back as %v with %d attempts", got, b.Messages[0].Attempts)
	}
}

func parksFailed(t *testing.T, s Store) {
	s.write(t, message("k", "1"), message("k", "2"))
	b := s.claim(t, outbox.ClaimRequest{})
	failed := outcomes(outbox.Failed, b.Messages[0])
	failed[0].Delay = time.Second
	begin := time.Now()
	s.settle(t, b, failed...)
	s.write(t, message("k", "3"), message("j", "4"))
	s.wantReady(t, quoted("4")...)
	eventually(t, func() string {
		b = s.claim(t, outbox.ClaimRequest{})
		defer s.settle(t, b)
		if slices.Contains(bodies(b), `"1"`) {
			return ""
		}
		return "the failed message is not ready"
	})
	if waited := time.Since(begin); waited < 900*time.Millisecond {
		t.Errorf("it was ready after %v, want its delay of 1 s", waited)
	}
	s.wantReady(t, quoted("1", "2", "3", "4")...)
	for _, m := range b.Messages {
		want := 0
		if string(m.Body) == `"1"` {
			want = 1
		}
		if m.Attempts != want {
			t.Errorf("%s has %d attempts", m.Body, m.Attempts)
		}
	}
	var keyed []string
	for _, m := range s.claim(t, outbox.ClaimRequest{}).Messages {
		if m.Key == "k" {
			keyed = append(keyed, string(m.Body))
		}
	}
	if !slices.Equal(keyed, quoted("1", "2", "3")) {
		t.Errorf("the key goes on as %v", keyed)
	}
}

func buriesDead(t *testing.T, s Store) {
	s.write(t, message("k", "1"), message("k", "2"))
	b := s.claim(t, outbox.ClaimRequest{})
	s.settle(t, b, outcomes(outbox.Dead, b.Messages[0])...)
	s.wantReady(t, quoted("2")...)
	dead, err := s.Dead(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(dead) != 1 || dead[0].ID != b.Messages[0].ID || dead[0].Attempts != 1 || string(dead[0].Body) != `"1"` {
		t.Errorf("dead letters %+v", dead)
	}
}

func skipsTransports(t *testing.T, s Store) {
	for i := range 20 {
		m := message("", strconv.Itoa(i))
		m.Transport = "down"
		s.write(t, m)
	}
	s.write(t, message("", "good"))
	b := s.claim(t, outbox.ClaimRequest{Limit: 1, Skip: []string{"down", "other"}})
	if got := bodies(b); !slices.Equal(got, quoted("good")) {
		t.Errorf("claimed %v", got)
	}
}

func fencesStaleLease(t *testing.T, s Store) {
	s.write(t, message("k", "1"), message("k", "2"))
	paused := s.claim(t, outbox.ClaimRequest{Lease: 300 * time.Millisecond})
	var second outbox.Batch
	eventually(t, func() string {
		if second = s.claim(t, outbox.ClaimRequest{}); len(second.Messages) == 0 {
			return "the lane of a relay that is gone is not claimed"
		}
		return ""
	})
	if got := bodies(second); !slices.Equal(got, quoted("1", "2")) {
		t.Errorf("claimed %v after the lease", got)
	}
	stale := s.settle(t, paused, append(outcomes(outbox.Published, paused.Messages[0]), outcomes(outbox.Dead, paused.Messages[1])...)...)
	if !slices.Equal(stale, paused.Leases) {
		t.Errorf("stale are %v, want %v", stale, paused.Leases)
	}
	if third := s.claim(t, outbox.ClaimRequest{}); len(third.Messages) > 0 {
		t.Error("a stale settle released the lane of another relay")
	}
	if stale := s.settle(t, second); len(stale) > 0 {
		t.Errorf("the holder is stale: %v", stale)
	}
	s.wantReady(t, quoted("1", "2")...)
}

func settlesOnce(t *testing.T, s Store) {
	s.write(t, message("k", "1"))
	b := s.claim(t, outbox.ClaimRequest{})
	s.settle(t, b)
	if stale := s.settle(t, b, outcomes(outbox.Published, b.Messages...)...); len(stale) != 1 {
		t.Errorf("a second settle has %v stale", stale)
	}
	s.wantReady(t, quoted("1")...)
}

func ignoresForeign(t *testing.T, s Store) {
	// Keys a and b lie in different lanes: a holder of one settles nothing of the other.
	a, b := message("a", "1"), message("b", "2")
	if outbox.LaneOf(a) == outbox.LaneOf(b) {
		t.Fatal("the keys share a lane")
	}
	s.write(t, b)
	other := s.claim(t, outbox.ClaimRequest{})
	s.settle(t, other)
	s.write(t, a)
	mine := s.claim(t, outbox.ClaimRequest{})
	if stray := outcomes(outbox.Published, other.Messages...); len(mine.Messages) == 1 {
		s.settle(t, mine, stray...)
		s.wantReady(t, quoted("1", "2")...)
	}
}

func refusesBadRequests(t *testing.T, s Store) {
	for _, req := range []outbox.ClaimRequest{{Limit: 0, Lease: lease}, {Limit: 1}, {Limit: 1, Lease: -1}} {
		if _, err := s.Source.Claim(t.Context(), req); err == nil {
			t.Errorf("Claim(%+v) was accepted", req)
		}
	}
}
