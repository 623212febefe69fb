package txretry

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/txretry/internal/session"
)

func TestFate(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	source := poolSource{pool}
	want := func(xid string, want session.Outcome, wantErr error) {
		t.Helper()
		if got, err := source.Fate(t.Context(), xid); got != want || !errors.Is(err, wantErr) {
			t.Errorf("fate of %s: %v, error %v, want %v, %v", xid, got, err, want, wantErr)
		}
	}
	for end, outcome := range map[string]session.Outcome{"commit": session.Committed, "rollback": session.RolledBack} {
		s, err := source.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Begin(t.Context(), beginKey{isolation: pgx.Serializable, wantsXID: true}.spec(), nil); err != nil {
			t.Fatal(err)
		}
		xid := s.XID()
		want(xid, session.Unknown, nil) // in progress
		if _, err := s.Tx().Exec(t.Context(), end); err != nil {
			t.Error(err)
		}
		s.Close()
		want(xid, outcome, nil)
	}
	want("4000000000000", session.Unknown, session.ErrForgotten)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := source.Fate(ctx, "1"); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}
