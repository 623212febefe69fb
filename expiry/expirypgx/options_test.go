package expirypgx_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
)

// fill makes rows 0 to n-1, the first of them the longest overdue.
func (b *backend) fill(t *testing.T, n int) {
	t.Helper()
	b.exec(t, `INSERT INTO holds (id, status, expires_at, seat)
		SELECT n::text, 'held', now() - interval '1 hour' + n * interval '1 ms', 'A' || n % 3 FROM generate_series(0, $1 - 1) n`, n)
}

func (b *backend) count(t *testing.T, condition string) (n int) {
	t.Helper()
	b.scan(t, &n, "SELECT count(*) FROM holds WHERE "+condition)
	return n
}

func TestWhereNarrowsEveryStatement(t *testing.T) {
	t.Parallel()
	b := newBackend(t)
	b.fill(t, 30)
	store := b.store(t, expirypgx.Config{Where: "seat = 'A1' OR seat = 'A2'", Emit: announceAll(b)})
	if found, err := store.Check(t.Context()); err != nil || len(found) > 0 {
		t.Errorf("Check found %v, %v", found, err)
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

// A query of one's own chooses; what it names is locked, and changed only if it is
// due.
func TestClaimOfOnesOwn(t *testing.T) {
	t.Parallel()
	b := newBackend(t)
	b.fill(t, 30)
	b.Put(t, "early", "held", time.Hour)
	b.Put(t, "sold", "confirmed", -time.Hour)
	var order []string
	store := b.store(t, expirypgx.Config{
		Claim: "SELECT id FROM holds WHERE (status = 'held' OR id = 'sold') AND id <> ALL($2) ORDER BY id IN ('early', 'sold') DESC, seat, id LIMIT $1 -- by seat",
		Emit: func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error {
			if slices.ContainsFunc(rows, func(r expiry.Row) bool { return r.ID == "4" }) {
				return errors.New("bad row")
			}
			for _, row := range rows {
				order = append(order, row.ID)
			}
			return announceAll(b)(ctx, tx, rows)
		},
	})
	if r := sweep(t, store, expiry.SweeperConfig{BatchSize: 12}); r.Poisoned != 1 || r.Expired != 29 || r.Raced == 0 || r.Claimed != r.Expired+r.Raced {
		t.Errorf("got %+v, want 29 expired, one set aside, and the two not due raced for", r)
	}
	if len(order) != 29 || !slices.Contains(order[:10], "27") {
		t.Errorf("expired in the order %v, want seat A0 first", order)
	}
	if b.count(t, "status = 'held'") != 2 || b.State(t, "sold") != "confirmed" || b.State(t, "early") != "held" {
		t.Errorf("rows that are not due have changed")
	}
}

// The handler of one row at a time gives what the one of a batch gives.
func TestEach(t *testing.T) {
	t.Parallel()
	b := newBackend(t)
	b.fill(t, 50)
	var calls, panics int
	store := b.store(t, expirypgx.Config{Each: func(ctx context.Context, tx pgx.Tx, row expiry.Row) error {
		calls++
		switch row.ID {
		case "7":
			panics++
			panic("boom")
		case "8": // its own failure
			_, err := tx.Exec(ctx, "SELECT 1/0")
			return err
		case "9": // hidden, so that the next row meets it
			_, _ = tx.Exec(ctx, "SELECT 1/0")
			return nil
		}
		return b.Announce(ctx, tx, row)
	}})
	if r := sweep(t, store, expiry.SweeperConfig{}); r.Expired != 47 || r.Poisoned != 3 {
		t.Errorf("got %+v, want 47 expired and 3 set aside", r)
	}
	if held := b.count(t, "status = 'held' AND id IN ('7', '8', '9')"); held != 3 || panics != 1 {
		t.Errorf("%d of the bad rows are held; the one that panics was tried %d times", held, panics)
	}
	var events int
	if b.scan(t, &events, "SELECT count(*) FROM events"); events != 47 {
		t.Errorf("%d events, want 47", events)
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

// What a Store finds unfit is not touched, and the error says how to mend it.
func TestUnfitTableIsNotTouched(t *testing.T) {
	t.Parallel()
	for name, sql := range map[string]string{
		"table":         "ALTER TABLE holds RENAME TO elsewhere",
		"column":        "ALTER TABLE holds RENAME expires_at TO deadline",
		"index":         "DROP INDEX holds_expires_at_id_idx",
		"without zone":  "ALTER TABLE holds ALTER expires_at TYPE timestamp",
		"null deadline": "ALTER TABLE holds ALTER expires_at DROP NOT NULL; INSERT INTO holds (id, status) VALUES ('null', 'held')",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBackend(t)
			b.fill(t, 3)
			if _, err := b.pool.Exec(t.Context(), sql, pgx.QueryExecModeSimpleProtocol); err != nil {
				t.Fatal(err)
			}
			sw, err := expiry.NewSweeper(b.Store(t, announceAll(b)), quiet())
			if err != nil {
				t.Fatal(err)
			}
			err = sw.Run(t.Context())
			unfit, ok := errors.AsType[*expiry.CheckError](err)
			if !ok || len(unfit.Findings) == 0 || unfit.Findings[0].Mend == "" {
				t.Errorf("Run returned %v, want what to mend", err)
			}
			var events int
			if b.scan(t, &events, "SELECT count(*) FROM events"); events > 0 {
				t.Errorf("%d rows were swept", events)
			}
		})
	}
}

// More bad rows than the quarantine holds, at the head, in the real order of
// bigints, do not keep the sweeper from those behind them.
func TestPoisonedHeadDoesNotStarveTheTail(t *testing.T) {
	t.Parallel()
	b := newBackend(t)
	b.exec(t, "ALTER TABLE holds ALTER id TYPE bigint USING id::bigint")
	b.exec(t, `INSERT INTO holds (id, status, expires_at) SELECT n, 'held', now() - interval '1 hour' FROM generate_series(1, 300) n`)
	store := b.store(t, expirypgx.Config{Emit: func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error {
		for _, row := range rows {
			if len(row.ID) < 3 { // 1 to 99
				return fmt.Errorf("row %s is bad", row.ID)
			}
		}
		return announceAll(b)(ctx, tx, rows)
	}})
	cfg := quiet()
	cfg.BatchSize, cfg.MaxQuarantine, cfg.MaxBackoff = 10, 12, 10*time.Millisecond
	sw, err := expiry.NewSweeper(store, cfg)
	if err != nil {
		t.Fatal(err)
	}
	background(t, sw.Run)
	eventually(t, func() error {
		if left := b.count(t, "status = 'held' AND id >= 100"); left > 0 {
			return fmt.Errorf("%d good rows wait", left)
		}
		return nil
	})
	if left := b.count(t, "status = 'held'"); left != 99 {
		t.Errorf("%d rows are left, want the bad ones", left)
	}
}
