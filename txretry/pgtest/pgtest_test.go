package pgtest_test

import (
	"os"
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry/pgtest"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// Every call creates a new schema, which is dropped at the end of the test.
func TestNew(t *testing.T) {
	t.Setenv(testenv.PostgresVar, os.Getenv(testenv.PostgresVar)) // unchanged
	checkSchemas(t)
}

// The process starts a server, and every call creates a schema on it.
func TestNewOnAPrivateServer(t *testing.T) {
	testenv.Nightly(t, "starts a server")
	t.Setenv(testenv.PostgresVar, "")
	checkSchemas(t)
}

func checkSchemas(t *testing.T) {
	t.Helper()
	observer := pgtest.New(t)
	var schema string
	t.Run("schema", func(t *testing.T) {
		pool := pgtest.New(t)
		if err := pool.QueryRow(t.Context(), "SELECT current_schema()").Scan(&schema); err != nil {
			t.Fatal(err)
		}
		for range 2 { // in both schemas
			if _, err := pool.Exec(t.Context(), "CREATE TABLE orders (id text PRIMARY KEY)"); err != nil {
				t.Fatal(err)
			}
			pool = observer
		}
	})
	var left bool
	err := observer.QueryRow(t.Context(), "SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)", schema).Scan(&left)
	if err != nil || schema == "" || left {
		t.Errorf("schema %q is left: %t, error %v", schema, left, err)
	}
}
