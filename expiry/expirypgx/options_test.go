package expirypgx_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/internal/testenv"
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

// More bad rows than the quarantine holds, at the head, in the real order of
// bigints, do not keep the sweeper from those behind them.
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
			return fmt.Errorf("%d good rows wait", left)
		}
		return nil
	})
	if left := b.count(t, "status = 'held'"); left != bad {
		t.Errorf("%d rows are left, want the bad ones", left)
	}
}
