package postgres_test

import (
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/postgres"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/silent"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// A process whose connection falls silent in the middle keeps no other from migrating.
func TestMigrate_silentConnection(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "waits for a timeout of the server")
	pgtest.SilentMigration(t, "pg_advisory_xact_lock", postgres.Migrate)
}

// A read on a connection that is silent goes to another one after a few seconds.
func TestReader_silentConnection(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	synctest.Test(t, func(t *testing.T) {
		s := silent.NewPostgres(t, url)
		pool := s.Pool(t, 10)
		must := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		must(postgres.Migrate(t.Context(), pool))
		const id = "01890a5d-ac96-774b-bcce-b302099a8057"
		_, err := pool.Exec(t.Context(), "insert into events (id, name, seats) values ($1, 'Concert', 1)", id)
		must(err)
		reader := postgres.NewReader(pool)
		for name, read := range map[string]func() error{
			"events":    func() error { _, err := reader.Events(t.Context(), "", 1); return err },
			"event map": func() error { _, err := reader.EventMap(t.Context(), id); return err },
			"stats":     func() error { _, err := reader.Stats(t.Context(), id); return err },
		} {
			must(read()) // opens a connection
			s.SilenceConnections()
			began := time.Now()
			must(read())
			silent.Took(t, name, began, 5*time.Second)
		}
	})
}
