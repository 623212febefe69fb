package faults_test

import (
	"cmp"
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

const seedVar = "HOLDFAST_CHAOS_SEED"

// long reports whether the long form was asked for.
func long(t testing.TB) bool {
	t.Helper()
	return testenv.Rounds(t) > 0
}

// scaled returns how many times something is done that the short form does n times.
func scaled(t testing.TB, n int) int {
	t.Helper()
	const short = 10
	return max(1, n*cmp.Or(testenv.Rounds(t), short)/short)
}

// seeded returns the source of a test's choices, whose seed is told when the test fails.
func seeded(t testing.TB) *rand.Rand {
	t.Helper()
	seed := rand.Uint64()
	if text := os.Getenv(seedVar); text != "" {
		var err error
		seed, err = strconv.ParseUint(text, 10, 64)
		must(t, err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("%s=%d", seedVar, seed)
		}
	})
	return rand.New(rand.NewPCG(seed, 0))
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
