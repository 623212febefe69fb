package postgres_test

import (
	"os"
	"testing"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/postgres"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// A process whose connection falls silent in the middle keeps no other from migrating.
func TestMigrateThatFallsSilent(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "waits for a timeout of the server")
	pgtest.SilentMigration(t, "pg_advisory_xact_lock", postgres.Migrate)
}
