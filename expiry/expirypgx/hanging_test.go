package expirypgx_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/silent"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// lock takes rows in a transaction that stays open until the test ends.
func (b *backend) lock(t *testing.T, sql string) {
	t.Helper()
	tx, err := b.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := tx.Rollback(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	if _, err := tx.Exec(t.Context(), sql); err != nil {
		t.Fatal(err)
	}
}

const trigger = `CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN %s; RETURN new; END $$;
	CREATE TRIGGER slow BEFORE UPDATE ON holds FOR EACH ROW WHEN (old.id = '0') EXECUTE FUNCTION slow()`

// hanging makes the row 0 hang on the server. (A handler that hangs: TestHangingRowStopsTheOthersOnlyBriefly of expiry.)
var hanging = map[string]func(t *testing.T, b *backend) expirypgx.Config{
	"row locked by another": func(t *testing.T, b *backend) expirypgx.Config {
		b.lock(t, "SELECT FROM holds WHERE id = '0' FOR UPDATE")
		return expirypgx.Config{Emit: announceAll(b)}
	},
	"trigger that sleeps": func(t *testing.T, b *backend) expirypgx.Config {
		b.exec(t, fmt.Sprintf(trigger, "PERFORM pg_sleep(600)"))
		return expirypgx.Config{Emit: announceAll(b)}
	},
	"trigger that waits for a lock": func(t *testing.T, b *backend) expirypgx.Config {
		b.exec(t, "CREATE TABLE seats AS SELECT 1 AS n; "+fmt.Sprintf(trigger, "UPDATE seats SET n = 2"))
		b.lock(t, "SELECT FROM seats FOR UPDATE")
		return expirypgx.Config{Emit: announceAll(b)}
	},
}

// One row that hangs, whatever makes it, keeps nobody for long: rows of other
// batches and those that fall due wait for one timeout at most, and those of its
// own batch until it is found. Where the server is at work in the meantime, the time is real.
func TestHangingRow(t *testing.T) {
	t.Parallel()
	pgtest.URL(t) // skips before there are subtests
	for name, prepare := range hanging {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if strings.HasPrefix(name, "trigger") {
				testenv.Nightly(t, "it waits for a minute, and asserts how long the others wait")
				testHangingRow(t, newBackend(t), prepare)
				return
			}
			onSilent(t, func(t *testing.T, _ *silent.Postgres, b, _ *backend) { testHangingRow(t, b, prepare) })
		})
	}
}

func testHangingRow(t *testing.T, b *backend, prepare func(*testing.T, *backend) expirypgx.Config) {
	t.Helper()
	const batchSize, due = 50, 300
	const timeout = 7 * time.Second // txretry takes a server that is silent for 9 s for lost
	b.fill(t, due)
	store := b.store(t, prepare(t, b))
	cfg := quiet()
	cfg.BatchSize, cfg.BatchTimeout = batchSize, timeout
	sw, err := expiry.NewSweeper(store, cfg)
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	background(t, sw.Run)
	eventually(t, func() error { return b.heldAtMost(t, batchSize) })
	if took := time.Since(start); took > 2*timeout {
		t.Errorf("the rows of other batches took %v", took)
	}
	for n := range 10 { // they fall due while it is searched for
		made, id := time.Now(), fmt.Sprint("new ", n)
		hold(t, store, id, 0)
		eventually(t, func() error {
			if b.State(t, id) != "expired" {
				return errors.New("a row that fell due meanwhile has not expired")
			}
			return nil
		})
		if took := time.Since(made); took > 2*timeout {
			t.Errorf("a row that fell due meanwhile expired %v late", took)
		}
	}
	eventually(t, func() error { return b.heldAtMost(t, 1) })
	if took := time.Since(start); took > 10*timeout { // 6 halvings, and their pauses
		t.Errorf("the rows of its own batch took %v", took)
	}
	if got := b.State(t, "0"); got != "held" {
		t.Errorf("the row that hangs is %s", got)
	}
}

func (b *backend) heldAtMost(t *testing.T, rows int) error {
	t.Helper()
	if left := b.count(t, "status = 'held'"); left > rows {
		return fmt.Errorf("%d rows are still held, want %d at most", left, rows)
	}
	return nil
}
