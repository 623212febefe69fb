package faults_test

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) {
	if role := os.Getenv(roleVar); role != "" {
		os.Exit(runChild(role))
	}
	os.Exit(testenv.Run(m))
}

var quiet = slog.New(slog.DiscardHandler)

const (
	roundsVar = "HOLDFAST_CHAOS_ROUNDS"
	seedVar   = "HOLDFAST_CHAOS_SEED"

	shortRounds = 10
)

// long reports whether the long form was asked for.
func long() bool { return os.Getenv(roundsVar) != "" }

// scaled returns how many times something is done that the short form does n times.
func scaled(t testing.TB, n int) int {
	t.Helper()
	rounds := number(t, roundsVar, shortRounds)
	return max(1, n*int(rounds)/shortRounds)
}

// seeded returns the source of a test's choices, whose seed is told when the test fails.
func seeded(t testing.TB) *rand.Rand {
	t.Helper()
	seed := number(t, seedVar, rand.Uint64())
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("%s=%d", seedVar, seed)
		}
	})
	return rand.New(rand.NewPCG(seed, 0))
}

func number(t testing.TB, variable string, otherwise uint64) uint64 {
	t.Helper()
	text := os.Getenv(variable)
	if text == "" {
		return otherwise
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatalf("%s: %v", variable, err)
	}
	return n
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// beside runs work until stop is called or the test ends, and fails the test with its error.
func beside(t testing.TB, work func(ctx context.Context) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var running sync.WaitGroup
	running.Go(func() {
		if err := work(ctx); err != nil {
			t.Error(err)
		}
	})
	stop = func() {
		cancel()
		running.Wait()
	}
	t.Cleanup(stop)
	return stop
}
