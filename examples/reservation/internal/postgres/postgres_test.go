package postgres_test

import (
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/postgres"
	"github.com/holdfast-go/holdfast/internal/silent"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// A migration whose connection falls silent does not block others for long: its transaction bounds how long the server
// keeps the lock.
func TestMigrate_boundsItsLock(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, sent := silent.NewPostgres(t, ""), ""
		s.Answer = func(sql string) (string, *pgproto3.ErrorResponse) {
			sent += sql + "\n"
			return "", nil
		}
		_ = postgres.Migrate(t.Context(), s.Pool(t, 1)) // the script has no tables
		if bound, lock := strings.Index(sent, "idle_in_transaction_session_timeout"), strings.Index(sent, "pg_advisory_xact_lock"); bound < 0 || lock < bound {
			t.Errorf("it sends\n%s", sent)
		}
	})
}

// A read on a silent connection is repeated on another one after a few seconds.
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
