package txretry

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry/driver"
)

func TestFate(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	source, begun := poolSource{pool}, time.Now()
	limits := driver.Limits{Acquire: time.Minute, Begin: time.Minute}
	want := func(xid string, want driver.Outcome, wantErr error) {
		t.Helper()
		if got, err := source.Fate(t.Context(), limits, xid, begun); got != want || !errors.Is(err, wantErr) {
			t.Errorf("fate of %s: %v, error %v, want %v, %v", xid, got, err, want, wantErr)
		}
	}
	begin := func() (s driver.Session, xid string) {
		t.Helper()
		s, err := source.Acquire(t.Context(), limits)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Begin(t.Context(), beginKey{isolation: pgx.Serializable, wantsXID: true}.spec(), nil); err != nil {
			t.Fatal(err)
		}
		return s, s.XID()
	}
	for end, outcome := range map[string]driver.Outcome{"commit": driver.Committed, "rollback": driver.RolledBack} {
		s, xid := begin()
		if _, err := s.Tx().Exec(t.Context(), end); err != nil {
			t.Error(err)
		}
		s.Close()
		want(xid, outcome, nil)
	}
	busy, xid := begin()
	asleep, wake := context.WithCancel(t.Context())
	var sleeping sync.WaitGroup
	sleeping.Go(func() { _, _ = busy.Tx().Exec(asleep, "select pg_sleep(600)") })
	testenv.Eventually(t, func() error {
		var active bool
		err := pool.QueryRow(t.Context(), "select exists (select from pg_stat_activity where backend_xid::text = $1 and state = 'active')", xid).Scan(&active)
		if err == nil && !active {
			err = errors.New("not at work yet")
		}
		return err
	})
	want(xid, driver.Unknown, nil)
	want(xid, driver.Unknown, nil) // it was left alone
	wake()
	sleeping.Wait()
	busy.Close()
	abandoned, xid := begin()
	testenv.Eventually(t, func() error {
		if got, err := source.Fate(t.Context(), limits, xid, begun); got != driver.RolledBack {
			return fmt.Errorf("fate %v, error %w", got, err)
		}
		return nil
	})
	_ = abandoned.Rollback(t.Context()) // the server has closed the connection
	abandoned.Close()
	want("4000000000000", driver.Unknown, driver.ErrForgotten)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := source.Fate(ctx, limits, "1", begun); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}
