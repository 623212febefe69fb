package outboxtest_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// A dead letter is published with the body that it was given; one that cannot be edited stays.
func TestEditedDeadLetters(t *testing.T) {
	store := outboxtest.New()
	dead := store.DeadLetters()
	for _, name := range []string{"a", "b"} {
		m := outbox.Message{Name: name, Body: []byte("1")}
		err := txretrytest.New(txretrytest.Config{}).Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error { return store.Write(ctx, tx, m) })
		if err != nil {
			t.Fatal(err)
		}
	}
	bury(t, store)
	no := errors.New("no")
	edit := func(m outbox.Message) ([]byte, error) {
		if m.Name == "b" {
			return nil, no
		}
		return []byte("2"), nil
	}
	for _, r := range []outbox.Replay{{DryRun: true, Edit: edit}, {By: "me", Edit: edit}} {
		if got, err := dead.Replay(t.Context(), outbox.Filter{}, r); got != (outbox.Replayed{Returned: 1, Failed: 1}) || !errors.Is(err, no) {
			t.Errorf("%+v, %v", got, err)
		}
	}
	waiting, err := store.Waiting(t.Context(), outbox.WaitingFilter{})
	if err != nil || len(waiting) != 1 || string(waiting[0].Body) != "2" {
		t.Errorf("waiting %+v, %v", waiting, err)
	}
}
