// Package conformance is the test suite for every writer, source and publisher of an outbox, fakes and real ones. Run
// it on your own implementations:
//
//	func TestSource(t *testing.T) {
//		conformance.TestWriter(t, conformance.Backend{Open: open})
//		conformance.TestSource(t, conformance.Backend{Open: open})
//		conformance.TestDeadLetters(t, conformance.Backend{Open: open})
//		conformance.TestParked(t, conformance.Backend{Open: open})
//	}
package conformance

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/txretry"
)

// patience is a limit to detect hangs.
const patience = time.Minute

// The delays of messages: until after the test, and a short one.
const (
	long  = time.Hour
	short = 50 * time.Millisecond
)

// each runs one case as a parallel subtest, in a synctest bubble if bubble is true.
func each(t *testing.T, bubble bool, name string, fn func(t *testing.T)) {
	t.Run(name, func(t *testing.T) {
		t.Parallel()
		if bubble {
			synctest.Test(t, fn)
			return
		}
		fn(t)
	})
}

// eventually polls until check returns "". It fails with the last problem.
func eventually(t *testing.T, check func() string) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		problem := check()
		if problem == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("after %v still: %s", patience, problem)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// Backend creates the stores under test.
type Backend struct {
	// Bubble is true if a store can run in a testing/synctest bubble.
	Bubble bool
	// Open returns a new, empty store for each case.
	Open func(t *testing.T) Store
}

// Store is one store: a writer and the source that reads its messages.
type Store struct {
	Source driver.Source
	// InTx calls fn with a write function bound to one transaction. It commits if fn returns nil. Otherwise it rolls
	// back and returns fn's error. It also returns the error of a failed commit.
	InTx func(ctx context.Context, fn func(write func(...outbox.Message) error) error) error
	// OnceInTx is like InTx for WriteOnce. Nil: the writer has no WriteOnce.
	OnceInTx func(ctx context.Context, fn func(once Once) error) error
	// DeadLetters are the dead letters of the store.
	DeadLetters outbox.DeadLetters
	// Parked are the messages of the store that wait for an attempt.
	Parked outbox.DeadLetters
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

// claimAlone is like claim, for a relay with nothing else in flight.
func (s Store) claimAlone(t *testing.T, req driver.Claim) driver.Batch {
	t.Helper()
	req.Alone = true
	return s.claim(t, req)
}

// claimLate is like claimAlone, but waits until there is a message, for example until the lease of a lost relay
// expires.
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

// wantReady claims everything, compares the bodies in any order, and releases the messages.
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

// ManagedBackend creates the writers under test, on transactions of txretry or of its fake.
type ManagedBackend struct {
	// Bubble is true if a store can run in a testing/synctest bubble.
	Bubble bool
	// Open returns a new, empty store for each case.
	Open func(t *testing.T) Managed
}

// Managed is a store with its writer in the form in which users call it.
type Managed struct {
	Store
	Manager   txretry.Transactor
	Write     func(ctx context.Context, tx pgx.Tx, msgs ...outbox.Message) error
	WriteOnce func(ctx context.Context, tx pgx.Tx, key string, m outbox.Message) (id uuid.UUID, first bool, err error)
	// Break makes tx fail like a failed statement, and returns its error.
	Break func(ctx context.Context, tx pgx.Tx) error
}

// TestManagedWriter checks where the errors of a writer occur: those of Write at COMMIT, those of WriteOnce
// immediately.
func TestManagedWriter(t *testing.T, b ManagedBackend) {
	for name, fn := range map[string]func(*testing.T, Managed){
		"a duplicate is refused by COMMIT":             refusesAtCommit,
		"two of one transaction are refused by COMMIT": refusesItsOwnDuplicate,
		"a savepoint takes its duplicate along":        dropsWithSavepoint,
		"Write into a failed transaction succeeds":     writesIntoFailed,
		"a transaction that only reads":                writesIntoReadOnly,
		"a transaction that has ended":                 writesIntoClosed,
	} {
		each(t, b.Bubble, name, func(t *testing.T) { fn(t, b.Open(t)) })
	}
}

func wantState(t *testing.T, what string, err error, want string) {
	t.Helper()
	var state interface{ SQLState() string }
	if !errors.As(err, &state) || state.SQLState() != want {
		t.Errorf("%s: %v, want %s", what, err, want)
	}
}

// stored writes one message and returns it.
func (m Managed) stored(t *testing.T) outbox.Message {
	t.Helper()
	msg, err := outbox.NewMessage("order.placed", "1")
	must(t, err)
	m.write(t, msg)
	return msg
}

func refusesAtCommit(t *testing.T, m Managed) {
	again, wrote := m.stored(t), false
	err := m.Manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		if err := m.Write(ctx, tx, message("", "before")); err != nil {
			return err
		}
		if err := m.Write(ctx, tx, again); err != nil {
			return err
		}
		wrote = true
		return m.Write(ctx, tx, message("", "behind"))
	})
	wantState(t, "a duplicate", err, "23505")
	if !wrote {
		t.Error("Write returned the error of COMMIT")
	}
	m.wantReady(t, quoted("1")...)
}

func refusesItsOwnDuplicate(t *testing.T, m Managed) {
	msg, err := outbox.NewMessage("order.placed", "1")
	must(t, err)
	err = m.Manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		return errors.Join(m.Write(ctx, tx, msg), m.Write(ctx, tx, msg))
	})
	wantState(t, "a duplicate of the same transaction", err, "23505")
	m.wantReady(t)
}

func dropsWithSavepoint(t *testing.T, m Managed) {
	again, failed := m.stored(t), errors.New("business error")
	err := m.Manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		err := pgx.BeginFunc(ctx, tx, func(sp pgx.Tx) error {
			return errors.Join(m.Write(ctx, sp, again, message("", "inside")), failed)
		})
		if !errors.Is(err, failed) {
			return err
		}
		return m.Write(ctx, tx, message("", "behind"))
	})
	if err != nil {
		t.Error(err)
	}
	m.wantReady(t, quoted("1", "behind")...)

	err = m.Manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		return pgx.BeginFunc(ctx, tx, func(sp pgx.Tx) error { return m.Write(ctx, sp, again) })
	})
	wantState(t, "a savepoint that is kept", err, "23505")
}

func writesIntoFailed(t *testing.T, m Managed) {
	m.writeOnce(t, "known")
	err := m.Manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		broken := m.Break(ctx, tx)
		if err := m.Write(ctx, tx, message("", "never")); err != nil {
			t.Errorf("Write: %v", err)
		}
		for _, key := range []string{"known", "new"} {
			_, _, err := m.WriteOnce(ctx, tx, key, message("", "never"))
			wantState(t, "WriteOnce of a key that is "+key, err, "25P02")
		}
		return broken
	})
	if err == nil {
		t.Error("the failed transaction has committed")
	}
	m.wantReady(t, quoted("once")...)
}

func writesIntoReadOnly(t *testing.T, m Managed) {
	m.writeOnce(t, "known")
	readOnly := txretry.Options{ReadOnly: true}
	err := m.Manager.DoWith(t.Context(), readOnly, func(ctx context.Context, tx pgx.Tx) error {
		if err := m.Write(ctx, tx, message("", "never")); err != nil {
			t.Errorf("Write: %v", err)
		}
		return nil
	})
	wantState(t, "COMMIT", err, "25006")
	for _, key := range []string{"known", "new"} {
		err := m.Manager.DoWith(t.Context(), readOnly, func(ctx context.Context, tx pgx.Tx) error {
			_, _, err := m.WriteOnce(ctx, tx, key, message("", "never"))
			return err
		})
		wantState(t, "WriteOnce of a key that is "+key, err, "25006")
	}
	m.wantReady(t, quoted("once")...)
}

func writesIntoClosed(t *testing.T, m Managed) {
	m.writeOnce(t, "known")
	var closed pgx.Tx
	err := m.Manager.Do(t.Context(), func(_ context.Context, tx pgx.Tx) error { closed = tx; return nil })
	must(t, err)
	if err := m.Write(t.Context(), closed, message("", "never")); !errors.Is(err, pgx.ErrTxClosed) {
		t.Errorf("Write: %v", err)
	}
	for _, key := range []string{"known", "new"} {
		if _, _, err := m.WriteOnce(t.Context(), closed, key, message("", "never")); !errors.Is(err, pgx.ErrTxClosed) {
			t.Errorf("WriteOnce of a key that is %s: %v", key, err)
		}
	}
	m.wantReady(t, quoted("once")...)
}

func (m Managed) writeOnce(t *testing.T, key string) {
	t.Helper()
	err := m.Manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		_, _, err := m.WriteOnce(ctx, tx, key, message("", "once"))
		return err
	})
	must(t, err)
}
