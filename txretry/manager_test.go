package txretry_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// After failed attempt n, with a random number r: min(1000ms, (0.5+r) × 50ms × 2^n).
func TestDelays(t *testing.T) {
	t.Parallel()
	for random, want := range map[float64][5]time.Duration{ // ms
		0:    {50, 100, 200, 400, 800},
		0.25: {75, 150, 300, 600, 1000},
		0.5:  {100, 200, 400, 800, 1000},
		0.75: {125, 250, 500, 1000, 1000},
	} {
		t.Run(fmt.Sprint(random), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) { checkDelays(t, random, want) })
		})
	}
}

func checkDelays(t *testing.T, random float64, wants [5]time.Duration) {
	t.Helper()
	script := make([]txretrytest.Fault, 6)
	for i := range script {
		script[i] = txretrytest.Fault{Point: txretrytest.AtCommit, SQLSTATE: "40001"}
	}
	m := txretrytest.New(txretrytest.Config{Script: script, Retry: txretry.Config{Rand: func() float64 { return random }}})
	var begun []time.Time
	err := m.Do(t.Context(), func(context.Context, pgx.Tx) error {
		begun = append(begun, time.Now())
		return nil
	})
	if err == nil || len(begun) != 6 {
		t.Fatalf("%d attempts, error %v; want 6 and an error", len(begun), err)
	}
	for i, want := range wants {
		if got := begun[i+1].Sub(begun[i]); got != want*time.Millisecond {
			t.Errorf("delay after failed attempt %d: %v, want %v", i+1, got, want*time.Millisecond)
		}
	}
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	if _, err := txretry.New(nil, txretry.Config{}); err == nil || !strings.Contains(err.Error(), "pool") {
		t.Errorf("nil pool: error %v", err)
	}
	if _, err := txretry.NewOver(nil, txretry.Config{}); err == nil || !strings.Contains(err.Error(), "source") {
		t.Errorf("nil source: error %v", err)
	}
	pool, err := pgxpool.New(t.Context(), "postgres://nobody@127.0.0.1:1/none")
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	_, err = txretry.New(pool, txretry.Config{
		Isolation: "chaos", MaxAttempts: -1, LockTimeout: time.Microsecond, StatementTimeout: time.Microsecond,
		BaseDelay: -1, MaxDelay: -1, CommitTimeout: -1, IdleTimeout: time.Microsecond,
	})
	if err == nil {
		t.Fatal("no error")
	}
	for _, field := range []string{
		"Isolation", "MaxAttempts", "LockTimeout", "StatementTimeout",
		"BaseDelay", "MaxDelay", "CommitTimeout", "IdleTimeout",
	} {
		if !strings.Contains(err.Error(), "Config."+field) {
			t.Errorf("the error does not name %s: %v", field, err)
		}
	}
}

// A user's test of its error mapping makes these errors itself.
func TestErrorsMadeByHand(t *testing.T) {
	t.Parallel()
	for _, err := range []error{&txretry.LockTimeoutError{}, &txretry.LockTimeoutError{Name: "seats.hold"}, &txretry.CommitUnknownError{}} {
		if err.Error() == "" || errors.Is(err, pgx.ErrTxClosed) {
			t.Errorf("error %v", err)
		}
	}
}
