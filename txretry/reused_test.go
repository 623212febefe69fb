package txretry_test

import (
	"context"
	"errors"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry"
)

// A server that crashes gives the id of a transaction of which it had written nothing to its disk to
// another one. What became of that one is no answer, and it is left alone.
func TestResolveAfterACrash(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		crash func(t *testing.T, server *testenv.Server)
		then  string // what the other transaction does before the question
		last  string // and after it
	}{
		"the server is killed":       {killServer, "commit", ""},
		"one of its backends killed": {killBackend, "select", "commit"}, // it is idle in its transaction
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if test.last == "" {
				testenv.Nightly(t, "kills a server; the other test kills a backend")
			}
			// Nothing else takes an id, or writes down which is the next one.
			server := testenv.Private(t, testenv.Postgres, "-c", "autovacuum=off", "-c", "wal_level=minimal", "-c", "max_wal_senders=0")
			proxy := testenv.NewProxy(t, server.URL())
			m := newManager(t, pgtest.Pool(t, proxy.URL(), 2), txretry.Config{XactStatus: true, CommitTimeout: testenv.Patience})
			var other *pgx.Conn
			calls, happened := 0, make(chan struct{})
			err := m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
				if calls++; calls > 1 {
					return errors.New("it ran again")
				}
				var lost string
				if err := tx.QueryRow(ctx, "select pg_current_xact_id()::text").Scan(&lost); err != nil {
					return err
				}
				proxy.SilenceOn(testenv.Silence{On: "commit"})
				go func() {
					defer close(happened)
					defer proxy.CutConnections()
					testenv.Eventually(t, func() error { return silenced(proxy) })
					test.crash(t, server)
					if other = takeID(t, server.URL(), lost); other != nil {
						execOn(t, other, test.then)
					}
				}()
				return nil
			})
			<-happened
			wantUnknown(t, err)
			if other != nil {
				execOn(t, other, test.last)
				_ = other.Close(t.Context())
			}
		})
	}
}

func silenced(proxy *testenv.Proxy) error {
	if proxy.Silenced() == 0 {
		return errors.New("COMMIT was not sent")
	}
	return nil
}

func execOn(t *testing.T, conn *pgx.Conn, sql string) {
	t.Helper()
	if _, err := conn.Exec(t.Context(), sql); err != nil {
		t.Errorf("%s: %v", sql, err)
	}
}

// takeID begins a transaction with the given id.
func takeID(t *testing.T, url, id string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Error(err)
		return nil
	}
	var got string
	execOn(t, conn, "begin")
	if err := conn.QueryRow(t.Context(), "select pg_current_xact_id()::text").Scan(&got); err != nil || got != id {
		t.Errorf("the id %s was given away as %s, %v", id, got, err)
	}
	return conn
}

func killServer(t *testing.T, server *testenv.Server) {
	t.Helper()
	if err := errors.Join(server.Kill(), server.Start(t.Context())); err != nil {
		t.Error(err)
	}
}

// killBackend returns when the server has recovered. Its own process goes on. A server that notices the kill ends all other
// sessions, and refuses new ones until it has recovered.
func killBackend(t *testing.T, server *testenv.Server) {
	t.Helper()
	killed, err := pgx.Connect(t.Context(), server.URL())
	if err != nil {
		t.Error(err)
		return
	}
	other, err := pgx.Connect(t.Context(), server.URL())
	if err != nil {
		t.Error(err)
		return
	}
	if err := syscall.Kill(int(killed.PgConn().PID()), syscall.SIGKILL); err != nil {
		t.Error(err)
		return
	}
	if _, err := other.Exec(t.Context(), "select pg_sleep(600)"); err == nil { // until the server ends the session
		t.Error("no other session was ended")
	}
	testenv.Eventually(t, func() error {
		conn, err := pgx.Connect(t.Context(), server.URL())
		if err == nil {
			err = conn.Close(t.Context())
		}
		return err
	})
}
