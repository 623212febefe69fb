package conformance

import (
	"context"
	"errors"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/txretry"
)

// ManagedBackend makes the writers under test, on transactions of txretry or of its fake.
type ManagedBackend struct {
	// Bubble says that a store can run in a testing/synctest bubble.
	Bubble bool
	// Open gives each case an empty store of its own.
	Open func(t *testing.T) Managed
}

// Managed is a store with the writer as it is used.
type Managed struct {
	Store
	Manager   txretry.Transactor
	Write     func(ctx context.Context, tx pgx.Tx, msgs ...outbox.Message) error
	WriteOnce func(ctx context.Context, tx pgx.Tx, key string, m outbox.Message) (id uuid.UUID, first bool, err error)
	// Break makes tx fail as a statement does, and returns its error.
	Break func(ctx context.Context, tx pgx.Tx) error
}

// TestManagedWriter checks where a writer's errors come from: those of Write out of COMMIT, and those
// of WriteOnce at once.
func TestManagedWriter(t *testing.T, b ManagedBackend) {
	for name, fn := range map[string]func(*testing.T, Managed){
		"a duplicate is refused by COMMIT":             refusesAtCommit,
		"two of one transaction are refused by COMMIT": refusesItsOwnDuplicate,
		"a savepoint takes its duplicate along":        dropsWithSavepoint,
		"a failed transaction is no matter of Write":   writesIntoFailed,
		"a transaction that only reads":                writesIntoReadOnly,
		"a transaction that is over":                   writesIntoClosed,
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
		t.Error("Write refused what COMMIT refuses")
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
