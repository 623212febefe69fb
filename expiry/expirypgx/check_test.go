package expirypgx_test

import (
	"context"
	"crypto/rand"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
)

// finding is an error with a fix.
type finding interface {
	error
	Fix() string
}

// findings returns the findings in the error of Check, and fails if it contains anything else.
func findings(t *testing.T, err error) (all []finding) {
	t.Helper()
	if err == nil {
		return nil
	}
	errs := []error{err}
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		errs = joined.Unwrap()
	}
	for _, err := range errs {
		f, ok := errors.AsType[finding](err)
		if !ok {
			t.Fatalf("Check failed: %v", err)
		}
		all = append(all, f)
	}
	return all
}

// checked returns the result of Check. It repeats a Check with a late answer or notification, as on a busy server.
func checked(t *testing.T, store *expirypgx.Store) error {
	t.Helper()
	late := func(err error) bool {
		return errors.Is(err, context.DeadlineExceeded) || err != nil && strings.Contains(err.Error(), "notifications do not arrive")
	}
	err := store.Check(t.Context())
	for end := time.Now().Add(testenv.Patience); late(err) && time.Now().Before(end); {
		err = store.Check(t.Context())
	}
	return err
}

func TestCheck(t *testing.T) {
	t.Parallel()
	const table = "CREATE TABLE holds (id text PRIMARY KEY, expires_at timestamptz, status text, seat text);"
	for name, tc := range map[string]struct{ sql, problem, fix string }{
		"no table":         {"SELECT 1", "does not exist", "create it"},
		"no column":        {"CREATE TABLE holds (id text, status text)", `no column "expires_at"`, "add it"},
		"without zone":     {"CREATE TABLE holds (id text, expires_at timestamp, status text)", "not timestamptz", "TYPE timestamptz"},
		"wrong enum":       {"CREATE TYPE s AS ENUM ('open'); CREATE TABLE holds (id text, expires_at timestamptz, status s)", "cannot hold", "Config.Active"},
		"no such state":    {"CREATE TYPE s AS ENUM ('held'); CREATE TABLE holds (id text, expires_at timestamptz, status s); CREATE INDEX ON holds (expires_at, id) WHERE status = 'held'", "cannot hold", "Config.Expired"},
		"never active":     {"CREATE TYPE s AS ENUM ('expired'); CREATE TABLE holds (id text, expires_at timestamptz, status s); CREATE INDEX ON holds (expires_at, id) WHERE status = 'expired'", "cannot hold", "Config.Active"},
		"status too short": {"CREATE TABLE holds (id text, expires_at timestamptz, status varchar(4)); CREATE INDEX ON holds (expires_at, id) WHERE status = 'held'", "cannot hold", "Config.Expired"},
		"no index":         {table, "no index", "CREATE INDEX"},
		"index on all":     {table + "CREATE INDEX ON holds (expires_at, id)", "no index", "CREATE INDEX"},
		"status behind":    {table + "CREATE INDEX ON holds (expires_at, id, status)", "no index", "CREATE INDEX"},
		"index elsewhere":  {table + "CREATE INDEX ON holds (expires_at, id) WHERE status = 'expired'", "no index", "CREATE INDEX"},
		"without deadline": {table + "CREATE INDEX ON holds (expires_at, id) WHERE status = 'held'; INSERT INTO holds VALUES ('x', NULL, 'held'), ('y', NULL, 'held'), ('a', NULL, 'sold')", `2 active rows of holds have no deadline and never expire, such as the one with the id "x"`, "SET NOT NULL"},
		"partial index":    {table + "CREATE INDEX ON holds (expires_at, id) WHERE status = 'held'", "", ""},
		"deadline alone":   {table + "CREATE INDEX ON holds (expires_at) WHERE status = 'held'", "", ""},
		"status first":     {table + "CREATE INDEX ON holds (status, expires_at, id)", "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := &backend{pool: pgtest.New(t)}
			b.exec(t, tc.sql)
			store := b.store(t, expirypgx.Config{})
			fit := store.Fit(t.Context())
			for n := 0; errors.Is(fit, pgcall.ErrSilent) && n < 3; n++ { // the server is busy
				fit = store.Fit(t.Context())
			}
			for _, err := range []error{checked(t, store), fit} {
				if tc.problem == "" {
					if err != nil {
						t.Errorf("found %v, want nothing", err)
					}
					continue
				}
				if found := findings(t, err); len(found) != 1 || !strings.Contains(found[0].Error(), tc.problem) || !strings.Contains(found[0].Fix(), tc.fix) {
					t.Errorf("found %v, want %q and %q", err, tc.problem, tc.fix)
				}
			}
		})
	}
}

// A trigger that may drop the change of a row is a finding of Check, but no reason to stop sweeping.
func TestCheck_findsTriggersThatDropChanges(t *testing.T) {
	t.Parallel()
	b := newBackend(t)
	b.exec(t, `CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
		CREATE TRIGGER keep BEFORE UPDATE ON holds FOR EACH ROW EXECUTE FUNCTION keep()`)
	store := b.store(t, expirypgx.Config{PollOnly: true})
	found := findings(t, checked(t, store))
	if len(found) != 1 || !strings.Contains(found[0].Error(), "trigger keep of table holds may drop changes") || !strings.Contains(found[0].Fix(), "DROP TRIGGER keep") {
		t.Errorf("found %v, want the trigger", found)
	}
	if err := store.Fit(t.Context()); err != nil {
		t.Errorf("Fit found %v, want nothing", err)
	}
}

// If row-level security hides rows from a sweeper, the sweeper logs it and Check reports it.
func TestHiddenRows_areReported(t *testing.T) {
	t.Parallel()
	b := newBackend(t)
	role := "sweeper_" + strings.ToLower(rand.Text())
	var schema string
	b.scan(t, &schema, "SELECT quote_ident(current_schema())")
	b.exec(t, `CREATE ROLE `+role+`; GRANT USAGE ON SCHEMA `+schema+` TO `+role+`; GRANT SELECT, UPDATE ON holds TO `+role+`; ALTER TABLE holds ENABLE ROW LEVEL SECURITY`)
	cfg := b.pool.Config()
	cfg.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, `SET ROLE `+role)
		return err
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		pool.Close()
		if _, err := b.pool.Exec(context.Background(), `DROP OWNED BY `+role+`; DROP ROLE `+role, pgx.QueryExecModeSimpleProtocol); err != nil {
			t.Error(err)
		}
	})
	lines := make(chan string, 1)
	logger := slog.New(slog.NewTextHandler(lineWriter(lines), nil))
	store := (&backend{pool: pool}).store(t, expirypgx.Config{PollOnly: true, Logger: logger})
	if found := findings(t, checked(t, store)); len(found) != 1 || !strings.Contains(found[0].Error(), "row-level security of table holds") {
		t.Errorf("found %v", found)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		store.Background(ctx, func(time.Time) {})
	}()
	testenv.Eventually(t, func() error {
		select {
		case line := <-lines:
			if !strings.Contains(line, "rows are hidden from the sweeper") {
				t.Errorf("logged %s", line)
			}
			return nil
		default:
			return errors.New("nothing is logged")
		}
	})
	cancel()
	<-ended
}

// lineWriter sends lines, and drops a line that nobody receives.
type lineWriter chan string

func (w lineWriter) Write(line []byte) (int, error) {
	select {
	case w <- string(line):
	default:
	}
	return len(line), nil
}

// Check tries another connection if one falls silent.
func TestCheckOnSilentConnection(t *testing.T) {
	t.Parallel()
	_, far, proxy := cutOff(t)
	proxy.SilenceOn(testenv.Silence{On: "format_type"})
	if err := far.store(t, expirypgx.Config{PollOnly: true}).Check(t.Context()); err != nil || proxy.Silenced() != 1 {
		t.Errorf("found %v, %d connections silent", err, proxy.Silenced())
	}
}

// Tables that the planner serves as well as with the suggested index.
func TestCheckAcceptsHealthyTables(t *testing.T) {
	t.Parallel()
	const columns = "(id text, expires_at timestamptz NOT NULL, status text, payment_status text, deleted_at timestamptz)"
	for name, tc := range map[string]struct{ sql, where string }{
		"index with Where":   {"CREATE TABLE holds " + columns + "; CREATE INDEX ON holds (expires_at, id) WHERE status = 'held' AND deleted_at IS NULL", "deleted_at IS NULL"},
		"Where on a status":  {"CREATE TABLE holds " + columns + "; CREATE INDEX ON holds (expires_at, id) WHERE status = 'held'", "payment_status = 'open'"},
		"Where in a comment": {"CREATE TABLE holds " + columns + "; CREATE INDEX ON holds (expires_at, id) WHERE status = 'held'", "deleted_at IS NULL -- live ones"},
		"domain":             {"CREATE DOMAIN moment AS timestamptz; CREATE TABLE holds (id text, expires_at moment NOT NULL, status text, payment_status text); CREATE INDEX ON holds (expires_at, id) WHERE status = 'held'", ""},
		"partitions": {"CREATE TABLE holds " + columns + " PARTITION BY RANGE (expires_at); CREATE TABLE a PARTITION OF holds FOR VALUES FROM (MINVALUE) TO ('2026-01-01'); " +
			"CREATE TABLE b PARTITION OF holds FOR VALUES FROM ('2026-01-01') TO (MAXVALUE); CREATE INDEX ON holds (expires_at, id) WHERE status = 'held'", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := &backend{pool: pgtest.New(t)}
			b.exec(t, tc.sql)
			b.exec(t, "INSERT INTO holds (id, expires_at, status, payment_status) VALUES ('x', now() - interval '1 hour', 'held', 'open'), ('y', now() + interval '1 hour', 'held', 'open')")
			store := b.store(t, expirypgx.Config{Where: tc.where})
			if err := checked(t, store); err != nil {
				t.Errorf("found %v, want nothing", err)
			}
			if o, err := store.Look(t.Context(), nil); err != nil || !o.Pending {
				t.Errorf("Look:  %+v, %v", o, err)
			}
		})
	}
}

// Check accepts the index that it suggests.
func TestCheck_suggestedIndexPasses(t *testing.T) {
	t.Parallel()
	b := newBackend(t)
	b.exec(t, "DROP INDEX holds_expires_at_id_idx")
	store := b.store(t, expirypgx.Config{})
	found := findings(t, checked(t, store))
	if len(found) != 1 {
		t.Fatalf("found %v", found)
	}
	b.exec(t, found[0].Fix())
	if err := checked(t, store); err != nil {
		t.Errorf("found %v after fixing", err)
	}
}

// Check accepts the statement and the condition that it suggests for rows without a deadline.
func TestCheck_suggestedDeadlineFixesPass(t *testing.T) {
	t.Parallel()
	b := newBackend(t)
	b.exec(t, "ALTER TABLE holds ALTER expires_at DROP NOT NULL")
	b.exec(t, "INSERT INTO holds (id, status) VALUES ('null', 'held')")
	if err := checked(t, b.store(t, expirypgx.Config{Where: "expires_at IS NOT NULL"})); err != nil {
		t.Errorf("found %v although Where leaves the row out", err)
	}
	store := b.store(t, expirypgx.Config{})
	found := findings(t, checked(t, store))
	if len(found) != 1 {
		t.Fatalf("found %v", found)
	}
	_, fix, _ := strings.Cut(found[0].Fix(), ": ")
	fix, _, _ = strings.Cut(fix, "; or ")
	b.exec(t, fix)
	if err := checked(t, store); err != nil {
		t.Errorf("found %v after %q", err, fix)
	}
}

// PgBouncer in transaction mode uses another connection for each statement, so no notification arrives.
func TestCheckFindsAPoolerThatSwallowsNotifications(t *testing.T) {
	t.Parallel()
	b := backendOn(t, pgtest.NewPooled(t))
	found := findings(t, b.store(t, expirypgx.Config{}).Check(t.Context()))
	if len(found) != 1 || !strings.Contains(found[0].Error(), "notifications do not arrive") || !strings.Contains(found[0].Fix(), "PollOnly") {
		t.Errorf("found %v, want that notifications do not arrive", found)
	}
	if err := checked(t, b.store(t, expirypgx.Config{PollOnly: true})); err != nil {
		t.Errorf("found %v with PollOnly", err)
	}
}
