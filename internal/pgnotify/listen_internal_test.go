package pgnotify

import (
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
)

// idle_session_timeout of the server does not end a listening session, so no warning is logged for it.
func TestListen_outlivesIdleSessionTimeout(t *testing.T) {
	t.Parallel()
	cfg := pgtest.New(t).Config()
	cfg.ConnConfig.RuntimeParams["idle_session_timeout"] = "10min"
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	if _, err := pool.Exec(t.Context(), "CREATE TABLE jobs (n int)"); err != nil {
		t.Fatal(err)
	}
	conn, err := Channel{Pool: pool, Prefix: "a_", Table: "jobs"}.listen(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer hangUp(conn)
	var timeout, others string
	var channel string
	if err := conn.QueryRow(t.Context(), "SELECT current_setting('idle_session_timeout'), pg_listening_channels()").Scan(&timeout, &channel); err != nil {
		t.Fatal(err)
	}
	if err := pool.QueryRow(t.Context(), "SELECT current_setting('idle_session_timeout')").Scan(&others); err != nil {
		t.Fatal(err)
	}
	if timeout != "0" || others != "10min" || channel == "" {
		t.Errorf("the session that listens to %q has idle_session_timeout %s, others %s", channel, timeout, others)
	}
}
