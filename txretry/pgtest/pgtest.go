// Package pgtest provides an empty schema on a real Postgres server for a test.
//
//	func TestPlace(t *testing.T) {
//		pool := pgtest.New(t)
//		// create the tables of the test, run the code, check the rows
//	}
//
// # Which server
//
// The server is the one in HOLDFAST_TEST_POSTGRES_URL, whose user must be allowed to create schemas. Without the
// variable, the package starts a server for the lifetime of the test process. It uses an installed PostgreSQL, in a
// temporary folder on a free port of the loopback interface. If none is installed, it uses a container, if Docker is
// available. The start takes a second or two in each package's tests. go test runs packages side by side, so for many
// packages a shared server is faster. If no server is available, the test is skipped, or fails if
// HOLDFAST_REQUIRE_SERVERS is 1. Set this in CI.
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

// New returns a pool of at most 10 connections whose search_path is a new, empty schema, so that tests may run in
// parallel. When the test ends, the pool is closed and the schema dropped. The test fails if it has not released a
// connection, or has left a transaction open.
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
	if testenv.Running() { // a test of this repository, which must start no server by default
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
