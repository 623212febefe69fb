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

// After failed attempt n, with d = 50ms × 2^n and a random number r:
// before the cap min(1000ms, (0.5+r) × d), after the cap (0.5+r) × min(1000ms, d),
// full r × min(1000ms, d).
func TestDelays(t *testing.T) {
	t.Parallel()
	tests := []struct {
		jitter txretry.Jitter
		random float64
		want   [5]time.Duration // ms
	}{
		{"", 0, [5]time.Duration{50, 100, 200, 400, 800}},
		{"", 0.25, [5]time.Duration{75, 150, 300, 600, 1000}},
		{"", 0.5, [5]time.Duration{100, 200, 400, 800, 1000}},
		{txretry.JitterBeforeCap, 0.75, [5]time.Duration{125, 250, 500, 1000, 1000}},
		{txretry.JitterAfterCap, 0, [5]time.Duration{50, 100, 200, 400, 500}},
		{txretry.JitterAfterCap, 0.5, [5]time.Duration{100, 200, 400, 800, 1000}},
		{txretry.JitterAfterCap, 0.75, [5]time.Duration{125, 250, 500, 1000, 1250}},
		{txretry.JitterFull, 0, [5]time.Duration{}},
		{txretry.JitterFull, 0.5, [5]time.Duration{50, 100, 200, 400, 500}},
		{txretry.JitterFull, 0.75, [5]time.Duration{75, 150, 300, 600, 750}},
	}
	for _, tt := range tests {
		t.Run(fmt.Sprintf("%s %v", tt.jitter, tt.random), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) { checkDelays(t, tt.jitter, tt.random, tt.want) })
		})
	}
}

func checkDelays(t *testing.T, jitter txretry.Jitter, random float64, wants [5]time.Duration) {
	t.Helper()
	script := make([]txretrytest.Fault, 6)
	for i := range script {
		script[i] = txretrytest.Fault{Point: txretrytest.AtCommit, SQLSTATE: "40001"}
	}
	var slept time.Duration
	m := txretrytest.New(txretrytest.Config{
		Script: script,
		Retry: txretry.Config{
			Jitter: jitter, Rand: func() float64 { return random },
			Hooks: txretry.Hooks{OnDone: func(_ context.Context, d txretry.Done) { slept = d.Phases.Sleep }},
		},
	})
	var begun []time.Time
	err := m.Do(t.Context(), func(context.Context, pgx.Tx) error {
		begun = append(begun, time.Now())
		return nil
	})
	if err == nil || len(begun) != 6 {
		t.Fatalf("%d attempts, error %v; want 6 and an error", len(begun), err)
	}
	var sum time.Duration
	for i, want := range wants {
		want *= time.Millisecond
		sum += want
		if got := begun[i+1].Sub(begun[i]); got != want {
			t.Errorf("delay after failed attempt %d: %v, want %v", i+1, got, want)
		}
	}
	if slept != sum {
		t.Errorf("reported %v of sleep, want %v", slept, sum)
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
		BaseDelay: -1, MaxDelay: -1, CommitTimeout: -1, RollbackTimeout: -1,
		IdleTimeout: time.Microsecond, TransactionTimeout: -1, Jitter: "some", DeadlineMargin: -1,
		Resolver: txretry.Probe(nil), ResolveTimeout: -1, RetryBudget: txretry.RetryBudget{Ratio: -1, Burst: -1},
	})
	if err == nil {
		t.Fatal("no error")
	}
	for _, field := range []string{
		"Isolation", "MaxAttempts", "LockTimeout", "StatementTimeout",
		"BaseDelay", "MaxDelay", "CommitTimeout", "RollbackTimeout",
		"IdleTimeout", "TransactionTimeout", "Jitter", "DeadlineMargin",
		"Resolver:", "ResolveTimeout", "RetryBudget.Ratio", "RetryBudget.Burst",
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
