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
