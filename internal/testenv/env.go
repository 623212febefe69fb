// Package testenv gives tests real servers: the shared ones whose addresses
// are in the environment, and private ones that a test may kill, pause and
// restart.
//
// # Shared servers
//
// PostgresURL, RedisURL, AMQPURL and AMQPAdminURL read HOLDFAST_TEST_POSTGRES_URL,
// HOLDFAST_TEST_REDIS_URL, HOLDFAST_TEST_AMQP_URL and HOLDFAST_TEST_AMQP_ADMIN_URL.
// Without the variable the test is skipped, or fails when HOLDFAST_REQUIRE_SERVERS=1.
// The command internal/lab/servers sets all of them:
//
//	go run ./internal/lab/servers -- go test ./...
//
// Tests share these servers, so each one takes a corner of its own through
// packages pgtest (a schema), redistest (a logical database) and amqptest
// (a virtual host).
//
// # Private servers
//
// Private starts an instance of an installed binary for one test, on free
// loopback ports and in a temporary folder; PgBouncer and Prometheus are there in this way only. Server has the faults: Kill,
// Pause, Resume, Restart. Proxy adds those of the network between.
//
// # Nothing left behind
//
// Every package with tests runs them through Run, which fails the package when
// a goroutine is left, and ends the private servers on an interrupt. On Linux
// a server also dies with the process that started it, whatever killed that
// one.
//
// The package needs a Unix system. Nothing but tests and tools imports it.
package testenv

import (
	"errors"
	"os"
	"strconv"
	"testing"
	"time"
)

// The variables that hold the addresses of the shared servers.
const (
	PostgresVar  = "HOLDFAST_TEST_POSTGRES_URL"
	RedisVar     = "HOLDFAST_TEST_REDIS_URL"
	AMQPVar      = "HOLDFAST_TEST_AMQP_URL"
	AMQPAdminVar = "HOLDFAST_TEST_AMQP_ADMIN_URL"

	// ChromiumVar is the path of a Chromium.
	ChromiumVar = "HOLDFAST_TEST_CHROMIUM"

	// RequireVar, set to 1, makes a missing server fail the test instead of skipping it.
	RequireVar = "HOLDFAST_REQUIRE_SERVERS"

	// PrivateVar, set to 1, allows tests to start private servers of the installed binaries.
	PrivateVar = "HOLDFAST_TEST_PRIVATE"

	// NightlyVar, set to 1, runs the nightly tests.
	NightlyVar = "HOLDFAST_NIGHTLY"

	// SequencesVar is how many random sequences the differential tests run, which compare the
	// answers of a fake with those of its server.
	SequencesVar = "HOLDFAST_FUZZ_SEQUENCES"
)

// Rounds returns how many further rounds a test of random faults plays: none with every change, 20 at night.
func Rounds(t testing.TB) int {
	t.Helper()
	if os.Getenv(NightlyVar) == "1" {
		return 20
	}
	return 0
}

// Sequences returns what SequencesVar says, or few if it says nothing.
func Sequences(t testing.TB, few int) int {
	t.Helper()
	return number(t, SequencesVar, few)
}

func number(t testing.TB, variable string, unset int) int {
	t.Helper()
	text := os.Getenv(variable)
	if text == "" {
		return unset
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("%s is %q", variable, text)
	}
	return n
}

// PostgresURL returns the address of the shared Postgres; tests want pgtest.New.
func PostgresURL(t testing.TB) string {
	t.Helper()
	return shared(t, PostgresVar)
}

// RedisURL returns the address of the shared Redis; tests want redistest.New.
func RedisURL(t testing.TB) string {
	t.Helper()
	return shared(t, RedisVar)
}

// AMQPURL returns the address of the shared RabbitMQ; tests want amqptest.New.
func AMQPURL(t testing.TB) string {
	t.Helper()
	return shared(t, AMQPVar)
}

// AMQPAdminURL returns the base of the shared RabbitMQ's management API, with credentials.
func AMQPAdminURL(t testing.TB) string {
	t.Helper()
	return shared(t, AMQPAdminVar)
}

// Chromium returns the path of the browser.
func Chromium(t testing.TB) string {
	t.Helper()
	return shared(t, ChromiumVar)
}

func shared(t testing.TB, variable string) string {
	t.Helper()
	url := os.Getenv(variable)
	if url == "" {
		Missing(t, variable+noServers)
	}
	return url
}

const noServers = " is not set: `go run ./internal/lab/servers -- go test PACKAGES` starts the servers and sets it"

// Private starts a server for this test alone, which it may kill, pause and restart.
// It is gone when the test ends. See Launch for extra.
// Unless PrivateVar is 1 and the machine has the binaries, the test is skipped, or fails when RequireVar is 1.
func Private(t testing.TB, kind Kind, extra ...string) *Server {
	t.Helper()
	AllowPrivate(t)
	s, err := Launch(t.Context(), kind, extra...)
	if errors.Is(err, ErrNotInstalled) {
		Missing(t, err.Error()+": a test that breaks its server needs the installed binaries")
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the log of %s ends in\n%s", kind, s.Log())
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// AllowPrivate skips the test unless PrivateVar allows it to start servers, or fails it when RequireVar is 1.
func AllowPrivate(t testing.TB) {
	t.Helper()
	if os.Getenv(PrivateVar) != "1" {
		Missing(t, PrivateVar+noServers)
	}
}

// Nightly skips a test that does not run with every change, because of the reason why: it waits for seconds,
// asserts a time, needs a machine of its own, or is large. `make nightly` runs it.
func Nightly(t testing.TB, why string) {
	t.Helper()
	if os.Getenv(NightlyVar) != "1" {
		t.Skip("nightly: " + why)
	}
}

// Missing skips the test, or fails it when RequireVar is 1.
func Missing(t testing.TB, why string) {
	t.Helper()
	if os.Getenv(RequireVar) == "1" {
		t.Fatal(why)
	}
	t.Skip(why)
}

// Patience is how long a test waits for something that must happen. It detects a hang and measures nothing:
// a test that asserts a time runs in a bubble of testing/synctest, or at night.
const Patience = 60 * time.Second

// Eventually calls check every 20 ms until it returns nil. It ends the test with the last error after Patience.
func Eventually(t testing.TB, check func() error) {
	t.Helper()
	deadline := time.Now().Add(Patience)
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("still failing after %v: %v", Patience, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}
