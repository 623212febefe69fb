package conformance

import (
	"context"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
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
	Source driver.Source
	// InTx calls fn with a write function bound to one transaction, commits when fn returns nil,
	// and else rolls back and returns fn's error. What commit itself refuses is returned too.
	InTx func(ctx context.Context, fn func(write func(...outbox.Message) error) error) error
	// OnceInTx is InTx for WriteOnce. Nil: the writer has none.
	OnceInTx func(ctx context.Context, fn func(once Once) error) error
	// DeadLetters are those of the store.
	DeadLetters outbox.DeadLetters
}

// Once is the WriteOnce of a writer, bound to a transaction.
type Once func(key string, m outbox.Message) (id uuid.UUID, first bool, err error)

const lease = time.Minute

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (s Store) write(t *testing.T, msgs ...outbox.Message) {
	t.Helper()
	if err := s.tryWrite(t.Context(), msgs...); err != nil {
		t.Fatalf("write: %v", err)
	}
}

func (s Store) tryWrite(ctx context.Context, msgs ...outbox.Message) error {
	return s.InTx(ctx, func(write func(...outbox.Message) error) error { return write(msgs...) })
}

func (s Store) claim(t *testing.T, req driver.Claim) driver.Batch {
	t.Helper()
	if req.Limit == 0 {
		req.Limit = 1000
	}
	if req.Lease == 0 {
		req.Lease = lease
	}
	for {
		b, err := s.Source.Claim(t.Context(), req)
		if err != nil {
			t.Fatalf("Claim: %v", err)
		}
		if len(b.Messages) == 0 && len(b.Leases) > 0 {
			t.Fatalf("a batch without messages has the leases %v", b.Leases)
		}
		if len(b.Messages) > 0 || !b.More {
			return b
		}
	}
}

// claimAlone is claim for a relay that has nothing else in hand.
func (s Store) claimAlone(t *testing.T, req driver.Claim) driver.Batch {
	t.Helper()
	req.Alone = true
	return s.claim(t, req)
}

// claimLate is claimAlone that waits until there is something, as when the lease of a relay that is gone runs out.
func (s Store) claimLate(t *testing.T, req driver.Claim) (b driver.Batch) {
	t.Helper()
	eventually(t, func() string {
		if b = s.claimAlone(t, req); len(b.Messages) == 0 {
			return "nothing to claim"
		}
		return ""
	})
	return b
}

func (s Store) settle(t *testing.T, b driver.Batch, outcomes ...driver.Settlement) []driver.Lease {
	t.Helper()
	settled, err := s.Source.Settle(t.Context(), b, outcomes)
	if err != nil {
		t.Fatalf("Settle: %v", err)
	}
	return settled.Stale
}

// wantReady claims everything, compares the bodies in any order, and gives it back.
func (s Store) wantReady(t *testing.T, want ...string) {
	t.Helper()
	var got []string
	var batches []driver.Batch
	for {
		b := s.claimAlone(t, driver.Claim{})
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

func bodies(b driver.Batch) []string {
	var got []string
	for _, m := range b.Messages {
		got = append(got, string(m.Body))
	}
	return got
}

func outcomes(v driver.Verdict, msgs ...driver.Message) []driver.Settlement {
	var out []driver.Settlement
	for _, m := range msgs {
		out = append(out, driver.Settlement{ID: m.ID, Verdict: v, Class: driver.Retryable, Err: "scripted"})
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
