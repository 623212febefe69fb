package expirypgx_test

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

func quiet() expiry.SweeperConfig {
	return expiry.SweeperConfig{Logger: slog.New(slog.DiscardHandler)}
}

func sweep(t *testing.T, s driver.Store, cfg expiry.SweeperConfig) expiry.Report {
	t.Helper()
	cfg.BatchTimeout = time.Minute
	report, err := newSweeper(t, s, cfg).Sweep(t.Context())
	must(t, err)
	return report
}

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

// Whoever locks a row first wins; a batch passes over it.
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

// The second statement repeats status and deadline: rows that share an id with
// one that is due, here its earlier versions, keep their state.
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
		t.Error("a row was expired that nobody announces")
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

// A row that loses its deadline while a sweeper runs does not stop it: the others
// expire, and the row is counted.
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

// A batch is READ COMMITTED unless another level is asked for.
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
