// Package testenv gives tests real servers: shared servers with addresses in the environment, and private servers that a
// test may kill, pause and restart.
//
// # Shared servers
//
// PostgresURL, RedisURL, AMQPURL and AMQPAdminURL read HOLDFAST_TEST_POSTGRES_URL, HOLDFAST_TEST_REDIS_URL,
// HOLDFAST_TEST_AMQP_URL and HOLDFAST_TEST_AMQP_ADMIN_URL. If the variable is not set, the test is skipped, or fails if
// HOLDFAST_REQUIRE_SERVERS=1. The command internal/lab/servers sets all of them:
//
//	go run ./internal/lab/servers -- go test ./...
//
// Tests share these servers. Each test isolates itself through package pgtest (a schema), redistest (a logical database) or
// amqptest (a virtual host).
//
// # Private servers
//
// Private starts an instance of an installed binary for one test, on free loopback ports and in a temporary folder.
// PgBouncer and Prometheus are only available this way. Server has the faults Kill, Pause, Resume and Restart. Proxy adds
// faults of the network between client and server.
//
// # Clean-up
//
// Every package with tests runs them through Run. Run fails the package if a goroutine is left, and ends the private servers
// on an interrupt. On Linux a server also dies with the process that started it, even if that process is killed.
//
// The package needs a Unix system. Only tests and tools import it.
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
	NATSVar      = "HOLDFAST_TEST_NATS_URL"

	// ChromiumVar is the path of a Chromium.
	ChromiumVar = "HOLDFAST_TEST_CHROMIUM"

	// RequireVar, set to 1, makes a missing server fail the test instead of skipping it.
	RequireVar = "HOLDFAST_REQUIRE_SERVERS"

	// PrivateVar, set to 1, allows tests to start private servers of the installed binaries.
	PrivateVar = "HOLDFAST_TEST_PRIVATE"

	// NightlyVar, set to 1, runs the nightly tests.
	NightlyVar = "HOLDFAST_NIGHTLY"

	// SequencesVar is the number of random sequences that the differential tests run. They compare the answers of a fake
	// with the answers of its server.
	SequencesVar = "HOLDFAST_FUZZ_SEQUENCES"
)

// Rounds returns the number of extra rounds of a test with random faults: 0 with every change, 20 at night.
func Rounds(t testing.TB) int {
	t.Helper()
	if os.Getenv(NightlyVar) == "1" {
		return 20
	}
	return 0
}

// Sequences returns the value of SequencesVar, or few if it is not set.
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

// PostgresURL returns the address of the shared Postgres. Most tests call pgtest.New instead.
func PostgresURL(t testing.TB) string {
	t.Helper()
	return shared(t, PostgresVar)
}

// RedisURL returns the address of the shared Redis. Most tests call redistest.New instead.
func RedisURL(t testing.TB) string {
	t.Helper()
	return shared(t, RedisVar)
}

// AMQPURL returns the address of the shared RabbitMQ. Most tests call amqptest.New instead.
func AMQPURL(t testing.TB) string {
	t.Helper()
	return shared(t, AMQPVar)
}

// AMQPAdminURL returns the base of the shared RabbitMQ's management API, with credentials.
func AMQPAdminURL(t testing.TB) string {
	t.Helper()
	return shared(t, AMQPAdminVar)
}

// NATSURL returns the address of the shared NATS; tests want names of their own for streams.
func NATSURL(t testing.TB) string {
	t.Helper()
	return shared(t, NATSVar)
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

// Private starts a server for this test alone, which may kill, pause and restart it. The server is removed when the test
// ends. See Launch for extra. The test is skipped, or fails if RequireVar is 1, unless PrivateVar is 1 and the machine has
// the binaries.
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
			t.Logf("end of the log of %s:\n%s", kind, s.Log())
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// AllowPrivate skips the test unless PrivateVar allows private servers. If RequireVar is 1, it fails the test instead.
func AllowPrivate(t testing.TB) {
	t.Helper()
	if os.Getenv(PrivateVar) != "1" {
		Missing(t, PrivateVar+noServers)
	}
}

// Nightly skips a test that should not run with every change. why is the reason: the test waits for seconds, asserts a time,
// needs its own machine, or is large. `make nightly` runs it.
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

// Patience is how long a test waits for something that must happen. It detects hangs and measures nothing. A test that
// asserts a time runs in a bubble of testing/synctest, or at night.
const Patience = 60 * time.Second

// Eventually calls check every 20 ms until it returns nil. After Patience it fails the test with the last error.
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
