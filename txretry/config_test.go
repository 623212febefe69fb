package txretry_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// The delays are min(1000ms, U(0.5, 1.5) × 50ms × 2^n) after failed attempt n.
func TestDelays(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name   string
		random float64
		want   [5]time.Duration // ms
	}{
		{"lowest", 0, [5]time.Duration{50, 100, 200, 400, 800}},
		{"below the middle", 0.25, [5]time.Duration{75, 150, 300, 600, 1000}},
		{"middle", 0.5, [5]time.Duration{100, 200, 400, 800, 1000}},
		{"high", 0.75, [5]time.Duration{125, 250, 500, 1000, 1000}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				script := make([]txretrytest.Fault, 6)
				for i := range script {
					script[i] = txretrytest.Fault{Point: txretrytest.AtCommit, SQLSTATE: "40001"}
				}
				m := txretrytest.NewManager(txretrytest.Config{
					Script: script,
					Retry:  txretry.Config{Rand: func() float64 { return tt.random }},
				})
				var begun []time.Time
				err := m.Do(t.Context(), func(context.Context, pgx.Tx) error {
					begun = append(begun, time.Now())
					return nil
				})
				if err == nil || len(begun) != 6 {
					t.Fatalf("%d attempts, error %v; want 6 and an error", len(begun), err)
				}
				for i, want := range tt.want {
					if got := begun[i+1].Sub(begun[i]); got != want*time.Millisecond {
						t.Errorf("delay after failed attempt %d: %v, want %vms", i+1, got, int(want))
					}
				}
			})
		})
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
		Isolation: "chaos", MaxAttempts: -1, LockTimeout: time.Microsecond, StatementTimeout: -1,
		BaseDelay: -1, MaxDelay: -1, CommitTimeout: -1, RollbackTimeout: -1,
	})
	if err == nil {
		t.Fatal("no error")
	}
	for _, field := range []string{
		"Isolation", "MaxAttempts", "LockTimeout", "StatementTimeout",
		"BaseDelay", "MaxDelay", "CommitTimeout", "RollbackTimeout",
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
