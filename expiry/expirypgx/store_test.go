package expirypgx_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

func TestRowIDTypesColumnsAndEnum(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct{ typ, id, bad string }{
		"uuid":   {"uuid", uuid.NewString(), uuid.NewString()},
		"bigint": {"bigint", "9007199254740993", "-7"},
		"text":   {"text", `it's "odd", {really}\`, "NULL"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool, schema := pgtest.NewSchema(t)
			b := &backend{pool: pool, table: "Odd"}
			b.exec(t, `CREATE TYPE state AS ENUM ('on hold', 'it''s over')`)
			b.exec(t, `CREATE TABLE "Odd" ("Key" `+tc.typ+` PRIMARY KEY, due timestamptz, "State" state NOT NULL, seats text[], buyer int)`)
			for _, id := range []string{tc.id, tc.bad} {
				b.exec(t, `INSERT INTO "Odd" VALUES ($1, now() - interval '1 minute', 'on hold', '{A1,A2}')`, id)
			}
			var got []expiry.Row
			store := b.store(t, expirypgx.Config{
				Schema: schema, ID: "Key", Deadline: "due", Status: "State", Active: "on hold", Expired: "it's over",
				Columns: []string{"seats", "buyer"},
				Emit: func(_ context.Context, _ pgx.Tx, rows []expiry.Row) error {
					got = append(got, rows...)
					return nil
				},
			})
			if batch, err := store.SweepBatch(t.Context(), driver.Request{Limit: 5, Skip: []string{tc.bad}}); err != nil || batch.Expired != 1 {
				t.Fatalf("got %+v, %v, want one row", batch, err)
			}
			if len(got) != 1 || got[0].ID != tc.id || got[0].Values["seats"] != "{A1,A2}" {
				t.Errorf("got the rows %+v", got)
			}
			if buyer, ok := got[0].Values["buyer"]; ok {
				t.Errorf("NULL came as %q", buyer)
			}
			if o, err := store.Look(t.Context(), nil); err != nil || !o.Pending || o.Overdue != 1 {
				t.Errorf("the other row is not due: %+v, %v", o, err)
			}
			if o, err := store.Look(t.Context(), []string{tc.bad}); err != nil || o.Pending || o.Overdue != 1 {
				t.Errorf("something is due beside the row left alone: %+v, %v", o, err)
			}
		})
	}
}

// Rows with one deadline are taken in the order of the key's own type, which the index and the position of the next batch
// have: 2 before 10. Otherwise each batch sorts all due rows, and a sweep passes by rows and ends without them.
func TestSweep_takesRowsOfOneDeadlineInOrder(t *testing.T) {
	t.Parallel()
	b := &backend{pool: pgtest.New(t)}
	b.exec(t, `CREATE TABLE holds (id bigint PRIMARY KEY, status text NOT NULL, expires_at timestamptz NOT NULL)`)
	b.exec(t, `INSERT INTO holds SELECT n, 'held', '2020-01-01' FROM generate_series(1, 3000) n`)
	b.exec(t, `CREATE INDEX ON holds (expires_at, id) WHERE status = 'held'`)
	b.exec(t, `ANALYZE holds`)
	var got []string
	store := b.store(t, expirypgx.Config{
		Columns: []string{"id", "expires_at"},
		Emit: func(_ context.Context, _ pgx.Tx, rows []expiry.Row) error {
			for _, row := range rows {
				got = append(got, row.ID)
			}
			return nil
		},
	})
	rows, err := b.pool.Query(t.Context(), "EXPLAIN "+expirypgx.Claim(store), "{}")
	must(t, err)
	plan, err := pgx.CollectRows(rows, pgx.RowTo[string])
	must(t, err)
	if text := strings.Join(plan, "\n"); strings.Contains(text, "Sort") {
		t.Errorf("a batch sorts the due rows:\n%s", text)
	}
	report := sweep(t, store, expiry.SweeperConfig{BatchSize: 700})
	if report.Expired != 3000 || b.count(t, "status = 'held'") != 0 {
		t.Errorf("one sweep expired %d of 3000 rows", report.Expired)
	}
	if !slices.IsSortedFunc(got, func(a, b string) int { return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b)) }) {
		t.Errorf("the order of the rows is %v", got)
	}
}

func TestInfiniteAndMissingDeadlines(t *testing.T) {
	t.Parallel()
	b := newBackend(t)
	b.exec(t, `ALTER TABLE holds ALTER expires_at DROP NOT NULL`)
	b.exec(t, `INSERT INTO holds VALUES ('never', 'infinity', 'held'), ('null', NULL, 'held')`)
	store := b.store(t, expirypgx.Config{})
	if o, err := store.Look(t.Context(), nil); err != nil || o.Pending || o.Overdue > 0 {
		t.Errorf("got %+v, %v, want nothing due", o, err)
	}
	if o, err := store.Look(t.Context(), nil); err != nil || o.Undated != 1 {
		t.Errorf("got %+v, %v, want the row without a deadline counted", o, err)
	}
	b.exec(t, `INSERT INTO holds VALUES ('always', '-infinity', 'held')`)
	if o, err := store.Look(t.Context(), nil); err != nil || !o.Pending || o.Due > 0 || o.Overdue != 1 {
		t.Errorf("got %+v, %v, want one row due", o, err)
	}
	b.exec(t, `DELETE FROM holds WHERE id = 'null'`)
	if report := sweep(t, store, expiry.SweeperConfig{}); report.Expired != 1 || report.Lag != 0 {
		t.Errorf("got %+v, want one row", report)
	}
}

// The transaction that locks a row first wins; a batch skips the row.
func TestLockedRowsArePassedOver(t *testing.T) {
	t.Parallel()
	b := newBackend(t)
	b.Put(t, "busy", "held", -time.Minute)
	b.Put(t, "free", "held", -time.Minute)
	tx, err := b.pool.Begin(t.Context())
	must(t, err)
	if _, err := tx.Exec(t.Context(), "UPDATE holds SET expires_at = now() + interval '1 hour' WHERE id = 'busy'"); err != nil {
		t.Fatal(err)
	}
	store := b.Store(t, nil)
	if report := sweep(t, store, expiry.SweeperConfig{}); report.Expired != 1 {
		t.Errorf("got %+v, want the free row", report)
	}
	must(t, tx.Commit(t.Context()))
	if report := sweep(t, store, expiry.SweeperConfig{}); report.Expired != 0 {
		t.Errorf("got %+v, the extended row must survive", report)
	}
	if got := b.State(t, "busy"); got != "held" {
		t.Errorf("the extended row is %s", got)
	}
}

// The second statement repeats status and deadline. Rows with the same id as a due row, here its earlier versions,
// keep their status.
func TestOnlyDueVersionsOfARowChange(t *testing.T) {
	t.Parallel()
	b := newBackend(t)
	b.exec(t, `ALTER TABLE holds DROP CONSTRAINT holds_pkey`)
	b.exec(t, `INSERT INTO holds VALUES ('a', now() - interval '1 hour', 'confirmed', 'old'),
		('a', now() + interval '1 hour', 'held', 'new'), ('a', now() - interval '1 minute', 'held', 'due')`)
	batch, err := b.Store(t, nil).SweepBatch(t.Context(), driver.Request{Limit: 10})
	if err != nil || batch.Expired != 1 {
		t.Fatalf("got %+v, %v, want one row", batch, err)
	}
	var states string
	b.scan(t, &states, "SELECT string_agg(seat || ' ' || status, ', ' ORDER BY seat) FROM holds")
	if want := "due expired, new held, old confirmed"; states != want {
		t.Errorf("the rows are %s, want %s", states, want)
	}

	b.exec(t, `INSERT INTO holds VALUES ('b', now() - interval '2 minutes', 'held'), ('b', now() - interval '1 minute', 'held')`)
	if _, err := b.Store(t, nil).SweepBatch(t.Context(), driver.Request{Limit: 1}); err == nil {
		t.Error("a row expired without an announcement")
	}
}

func TestNewReportsEveryViolation(t *testing.T) {
	t.Parallel()
	_, err := expirypgx.New(txretrytest.New(txretrytest.Config{}), "holds; DROP TABLE holds", expirypgx.Config{
		Schema: "a.b", ID: "x", Deadline: "x", Active: "a\\", Expired: strings.Repeat("e", 64),
		Columns: []string{`"`}, Isolation: "read uncommitted",
	})
	for _, want := range []string{"pool", "Schema", "table", "same column", "Active", "Expired", "Columns[0]", "Isolation"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not name %s", err, want)
		}
	}
	if _, err := expirypgx.New(nil, "t", expirypgx.Config{Active: "x", Expired: "x"}); err == nil || !strings.Contains(err.Error(), "both") {
		t.Errorf("equal states: %v", err)
	}
}

func TestHoldOfTwoSecondsExpiresOnTime(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "asserts a time")
	b := newBackend(t)
	store, _ := b.sweeper(t, expiry.SweeperConfig{})
	for n := range 3 {
		hold(t, store, fmt.Sprint(n), 2*time.Second)
	}
	if late := b.latest(t, 3); late < 0 || late > onTime {
		t.Errorf("expired %v late", late)
	}
}

// A row that loses its deadline while a sweeper runs does not stop it. The others expire, and the row is counted.
func TestDeadlineLostOnTheWay(t *testing.T) {
	t.Parallel()
	b := newBackend(t)
	b.exec(t, `ALTER TABLE holds ALTER expires_at DROP NOT NULL`)
	store := b.store(t, expirypgx.Config{Emit: announceAll(b)})
	sw := newSweeper(t, store, quiet())
	background(t, sw.Run)
	eventually(t, func() error { return sw.Ready(t.Context()) })
	b.exec(t, `INSERT INTO holds VALUES ('null', NULL, 'held'), ('due', now() - interval '1 hour', 'held')`)
	for _, id := range []string{"due", "next"} {
		b.Put(t, id, "held", -time.Hour)
		store.Wake(time.Time{})
		eventually(t, func() error {
			if got := b.State(t, id); got != "expired" {
				return fmt.Errorf("row %s is %s", id, got)
			}
			return sw.Ready(t.Context())
		})
	}
	if o, err := store.Look(t.Context(), nil); err != nil || o.Undated != 1 || b.State(t, "null") != "held" {
		t.Errorf("got %+v, %v, want the one row without a deadline", o, err)
	}
}

// A batch is READ COMMITTED unless Config sets another level.
func TestIsolationOfABatch(t *testing.T) {
	t.Parallel()
	for isolation, want := range map[pgx.TxIsoLevel]string{"": "read committed", pgx.RepeatableRead: "repeatable read", pgx.Serializable: "serializable"} {
		b := newBackend(t)
		b.fill(t, 1)
		var got string
		store := b.store(t, expirypgx.Config{Isolation: isolation, Emit: func(ctx context.Context, tx pgx.Tx, _ []expiry.Row) error {
			return tx.QueryRow(ctx, "SHOW transaction_isolation").Scan(&got)
		}})
		if sweep(t, store, expiry.SweeperConfig{}); got != want {
			t.Errorf("a batch is %q, want %q", got, want)
		}
	}
}

func TestOverdue(t *testing.T) {
	t.Parallel()
	b := newBackend(t)
	b.exec(t, `INSERT INTO holds (id, expires_at, status, seat) VALUES
		('a', now() - interval '2 hours', 'held', 'A1'), ('b', now() - interval '3 hours', 'held', NULL), ('c', now() - interval '1 second', 'held', 'C'),
		('d', now() + interval '1 hour', 'held', 'D'), ('e', now() - interval '9 hours', 'expired', 'E'), ('f', '-infinity', 'held', 'F')`)
	store := b.store(t, expirypgx.Config{Columns: []string{"seat"}})
	for _, tc := range []struct {
		by    time.Duration
		limit int
		want  []string
	}{{0, 10, []string{"f", "b", "a", "c"}}, {time.Minute, 10, []string{"f", "b", "a"}}, {150 * time.Minute, 10, []string{"f", "b"}}, {0, 2, []string{"f", "b"}}} {
		rows, err := store.Overdue(t.Context(), tc.by, tc.limit)
		must(t, err)
		var got []string
		for _, r := range rows {
			got = append(got, r.ID)
			if r.ID == "a" && (r.Values["seat"] != "A1" || time.Since(r.Deadline) < time.Hour) {
				t.Errorf("%+v", r)
			}
		}
		if !slices.Equal(got, tc.want) {
			t.Errorf("by %v, at most %d: %v, want %v", tc.by, tc.limit, got, tc.want)
		}
	}
	for _, bad := range []struct {
		by    time.Duration
		limit int
	}{{-1, 1}, {0, 0}} {
		if _, err := store.Overdue(t.Context(), bad.by, bad.limit); err == nil {
			t.Errorf("%+v: no error", bad)
		}
	}
}

func TestWhereNarrowsEveryStatement(t *testing.T) {
	t.Parallel()
	b := newBackend(t)
	b.fill(t, 30)
	store := b.store(t, expirypgx.Config{Where: "seat = 'A1' OR seat = 'A2'", Emit: announceAll(b)})
	if err := checked(t, store); err != nil {
		t.Errorf("Check found %v", err)
	}
	if o, err := store.Look(t.Context(), nil); err != nil || o.Overdue != 20 {
		t.Errorf("got %+v, %v, want 20 overdue", o, err)
	}
	if r := sweep(t, store, expiry.SweeperConfig{BatchSize: 7}); r.Expired != 20 || b.count(t, "status = 'held' AND seat = 'A0'") != 10 {
		t.Errorf("got %+v, want the 20 rows", r)
	}
	if o, err := store.Look(t.Context(), nil); err != nil || o.Pending || o.Overdue > 0 {
		t.Errorf("got %+v, %v, want nothing due", o, err)
	}
}

func TestMessagesMakesOneWrite(t *testing.T) {
	t.Parallel()
	b := newBackend(t)
	b.fill(t, 50)
	var writes [][]string
	write := func(_ context.Context, _ pgx.Tx, messages ...string) error {
		writes = append(writes, messages)
		return nil
	}
	store := b.store(t, expirypgx.Config{Columns: []string{"seat"}, Emit: expirypgx.Messages(write, func(row expiry.Row) (string, error) {
		switch row.ID {
		case "7":
			return "", errors.New("no message for it")
		case "8":
			panic("boom")
		}
		return row.ID + " " + row.Values["seat"], nil
	})})
	r := sweep(t, store, expiry.SweeperConfig{})
	if r.Expired != 48 || r.Poisoned != 2 || len(writes) != 1 || len(writes[0]) != 48 || writes[0][4] != "4 A1" {
		t.Errorf("got %+v and wrote %v, want 48 messages at once", r, writes)
	}
}

// Many bad rows at the head, more than the quarantine holds and in the real order of bigints, do not keep the sweeper
// from the rows behind them.
func TestPoisonedHeadDoesNotStarveTheTail(t *testing.T) {
	t.Parallel()
	const bad, all = 1050, 1100
	b := newBackend(t)
	b.exec(t, "ALTER TABLE holds ALTER id TYPE bigint USING id::bigint")
	b.exec(t, `INSERT INTO holds (id, status, expires_at) SELECT n, 'held', now() - interval '1 hour' FROM generate_series(1, $1) n`, all)
	store := b.store(t, expirypgx.Config{Emit: func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error {
		for _, row := range rows {
			if n, err := strconv.Atoi(row.ID); err != nil || n <= bad {
				return &expiry.RowError{ID: row.ID, Err: errors.New("bad row")}
			}
		}
		return announceAll(b)(ctx, tx, rows)
	}})
	cfg := quiet()
	cfg.BatchSize = 10
	sw := newSweeper(t, store, cfg)
	background(t, sw.Run)
	testenv.Eventually(t, func() error {
		if left := b.count(t, "status = 'held' AND id > "+strconv.Itoa(bad)); left > 0 {
			return fmt.Errorf("%d good rows have not expired", left)
		}
		return nil
	})
	if left := b.count(t, "status = 'held'"); left != bad {
		t.Errorf("%d rows are left, want the bad ones", left)
	}
}

// A row that a trigger or a constraint rejects is found and quarantined. A schema error, a conflict or a full disk is
// no row's fault. The conformance suite tests the SQLSTATEs of a callback.
func TestSweepBatch_namesRowsAtFault(t *testing.T) {
	t.Parallel()
	statement := func(sql string) func(context.Context, pgx.Tx, []expiry.Row) error {
		return func(ctx context.Context, tx pgx.Tx, _ []expiry.Row) error {
			_, err := tx.Exec(ctx, sql)
			return err
		}
	}
	for name, tc := range map[string]struct {
		prepare string
		emit    func(context.Context, pgx.Tx, []expiry.Row) error
		blamed  bool
	}{
		"trigger": {prepare: `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'refused'; END $$;
			CREATE TRIGGER refuse BEFORE UPDATE ON holds FOR EACH ROW EXECUTE FUNCTION refuse()`, blamed: true},
		"check constraint":   {prepare: `ALTER TABLE holds ADD CHECK (status <> 'expired' OR seat IS NOT NULL) NOT VALID`, blamed: true},
		"deferred to commit": {prepare: `CREATE TABLE p (id text PRIMARY KEY); CREATE TABLE c (id text REFERENCES p DEFERRABLE INITIALLY DEFERRED)`, emit: statement("INSERT INTO c VALUES ('x')"), blamed: true},
		"a list of errors":   {emit: func(context.Context, pgx.Tx, []expiry.Row) error { return violations{"no"} }, blamed: true},
		"swallowed, then on": {emit: func(ctx context.Context, tx pgx.Tx, _ []expiry.Row) error {
			_, _ = tx.Exec(ctx, "SELECT 1/0")
			_, err := tx.Exec(ctx, "SELECT 1")
			return err
		}, blamed: true},
		"column gone":     {prepare: `ALTER TABLE holds DROP status`},
		"connection lost": {emit: statement("SELECT pg_terminate_backend(pg_backend_pid())")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBackend(t)
			b.Put(t, "row", "held", -time.Minute)
			if tc.prepare != "" {
				b.exec(t, tc.prepare)
			}
			_, err := b.Store(t, tc.emit).SweepBatch(t.Context(), driver.Request{Limit: 10})
			if err == nil {
				t.Fatal("the batch succeeded")
			}
			failed, ok := errors.AsType[*driver.BatchError](err)
			if blamed := ok && !failed.Doubtful; blamed != tc.blamed || blamed != strings.Contains(err.Error(), "may be at fault") {
				t.Errorf("blamed: %v, want %v: %v", blamed, tc.blamed, err)
			}
		})
	}
}

// violations is an error that is not comparable, as some validators return.
type violations []string

func (v violations) Error() string { return strings.Join(v, ", ") }

// A retried attempt leaves nothing in the result.
func TestRetriedAttemptLeavesNothing(t *testing.T) {
	t.Parallel()
	b := newBackend(t)
	b.Put(t, "row", "held", -time.Minute)
	attempts := 0
	_, err := b.Store(t, func(ctx context.Context, tx pgx.Tx, _ []expiry.Row) error {
		if attempts++; attempts == 1 {
			_, err := tx.Exec(ctx, "DO $$ BEGIN RAISE 'conflict' USING ERRCODE = '40001'; END $$")
			return err
		}
		return errors.New("bad row")
	}).SweepBatch(t.Context(), driver.Request{Limit: 10})
	blamed, ok := errors.AsType[*driver.BatchError](err)
	if !ok || attempts != 2 || len(blamed.Rows) != 1 {
		t.Errorf("after %d attempts got %v", attempts, err)
	}
}

// If a trigger silently keeps a row unchanged, the row is at fault. It must not stop the others, come back in every
// batch, or be announced.
func TestRowsThatDoNotChange(t *testing.T) {
	t.Parallel()
	pgtest.New(t)                                    // skips before the subtests start
	for name, trigger := range map[string][2]string{ // time of the trigger and body of its function
		"dropped":           {"BEFORE UPDATE", `RETURN NULL;`},
		"the old row":       {"BEFORE UPDATE", `RETURN OLD;`},
		"the old status":    {"BEFORE UPDATE", `NEW.status := OLD.status; RETURN NEW;`},
		"postponed":         {"BEFORE UPDATE", `NEW.status := OLD.status; NEW.expires_at := now() + interval '1 day'; RETURN NEW;`},
		"undone afterwards": {"AFTER UPDATE", `IF NEW.status = 'expired' THEN UPDATE holds SET status = 'held' WHERE id = NEW.id; END IF; RETURN NULL;`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBackend(t)
			b.exec(t, `CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN `+trigger[1]+` END $$;
				CREATE TRIGGER keep `+trigger[0]+` ON holds FOR EACH ROW WHEN (OLD.seat = 'kept') EXECUTE FUNCTION keep()`)
			b.exec(t, `INSERT INTO holds SELECT n, now() - interval '1 hour', 'held', CASE WHEN n % 3 = 0 THEN 'kept' END FROM generate_series(1, 12) n`)
			ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
			defer cancel()
			sw := newSweeper(t, b.Store(t, announceAll(b)), expiry.SweeperConfig{BatchSize: 2, Logger: slog.New(slog.DiscardHandler)})
			if report, err := sw.Sweep(ctx); err != nil || report.Expired != 8 || report.Poisoned != 4 {
				t.Errorf("got %+v, %v, want 8 expired and 4 set aside", report, err)
			}
			var events, expired int
			b.scan(t, &events, "SELECT count(*) FROM events")
			b.scan(t, &expired, "SELECT count(*) FROM holds WHERE status = 'expired'")
			if events != 8 || expired != 8 {
				t.Errorf("%d events, %d expired, want 8", events, expired)
			}
		})
	}
}

// A statement timeout makes batches smaller, but puts no row in quarantine.
func TestStatementTimeoutHalvesTheBatch(t *testing.T) {
	t.Parallel()
	b := newBackend(t)
	for n := range 8 {
		b.Put(t, fmt.Sprint(n), "held", -time.Minute)
	}
	store := b.Store(t, func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error {
		if len(rows) <= 2 {
			return nil
		}
		_, err := tx.Exec(ctx, "SET LOCAL statement_timeout = '50ms'; SELECT pg_sleep(10)", pgx.QueryExecModeSimpleProtocol)
		return err
	})
	if report := sweep(t, store, expiry.SweeperConfig{}); report.Expired != 8 || report.Poisoned != 0 {
		t.Errorf("got %+v, want all expired", report)
	}
}

// A row at the head that fails by something that is no row's fault does not block the rows behind it, even with
// batches of one row.
func TestDoubtfulRowIsPassedBy(t *testing.T) {
	t.Parallel()
	for _, size := range []int{1, 2, 200} {
		b := newBackend(t)
		b.exec(t, `CREATE FUNCTION stumble() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM * FROM nowhere; RETURN new; END $$;
			CREATE TRIGGER stumble BEFORE UPDATE ON holds FOR EACH ROW WHEN (old.id = '0') EXECUTE FUNCTION stumble()`)
		b.fill(t, 20)
		cfg := quiet()
		cfg.BatchSize = size
		sw := newSweeper(t, b.Store(t, announceAll(b)), cfg)
		background(t, sw.Run)
		eventually(t, func() error {
			if left := b.count(t, "status = 'held'"); left != 1 {
				return fmt.Errorf("batches of %d: %d rows are left, want the one at the head", size, left)
			}
			return nil
		})
		b.exec(t, "DROP TRIGGER stumble ON holds")
		b.untilState(t, "0", "expired")
	}
}
