// Package pgtest gives a test an empty schema on a real Postgres.
//
//	func TestPlace(t *testing.T) {
//		pool := pgtest.New(t)
//		// create the tables of the test, run the code, look at the rows
//	}
//
// # Which server
//
// The one that HOLDFAST_TEST_POSTGRES_URL names, whose user may create schemas. Without the variable it
// is one that lasts as long as the test process: an installed PostgreSQL, started in a temporary folder
// on a free port of the loopback interface, or, where there is none, a container, if Docker answers.
// Starting takes a second or two in each package's tests; go test runs packages side by side, so for
// many packages a shared server is faster. Where there is no server at all, the test is skipped, or
// fails if HOLDFAST_REQUIRE_SERVERS is 1, as it should be in CI.
//
// The package needs a Unix system, and is for tests only.
package pgtest

import (
	"context"
	"errors"
	"os"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
)

// New returns a pool of at most 10 connections whose search_path is a fresh, empty schema, so that
// tests may run in parallel. When the test ends the pool is closed and the schema dropped; a connection
// that the test has not given back, or a transaction that it left open, is an error then.
func New(t testing.TB) *pgxpool.Pool {
	t.Helper()
	url := os.Getenv(testenv.PostgresVar)
	if url == "" {
		url = private(t)
	}
	return pgtest.NewOn(t, url)
}

// started is the private server of this process.
var started = sync.OnceValues(func() (string, error) { return testenv.Detached(context.Background()) })

func private(t testing.TB) string {
	t.Helper()
	if testenv.Running() { // a test of this repository, which starts no server unasked
		testenv.AllowPrivate(t)
	}
	url, err := started()
	switch {
	case errors.Is(err, testenv.ErrNotInstalled):
		testenv.Missing(t, "no Postgres: install it, or start Docker, or set "+testenv.PostgresVar)
	case err != nil:
		t.Fatal(err)
	}
	return url
}
