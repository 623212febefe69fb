package expirypgx_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// A row that a trigger or a constraint refuses is found and set aside; an error of
// the schema, a conflict or a full disk is no row's fault, and no row is accused. The conformance suite goes through the SQLSTATEs of a callback.
func TestWhoIsToBlame(t *testing.T) {
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
				t.Fatal("the batch went through")
			}
			failed, ok := errors.AsType[*driver.BatchError](err)
			if blamed := ok && !failed.Doubtful; blamed != tc.blamed || blamed != strings.Contains(err.Error(), "may be at fault") {
				t.Errorf("blamed: %v, want %v: %v", blamed, tc.blamed, err)
			}
		})
	}
}

// violations are an error that cannot be compared, as validators return them.
type violations []string

func (v violations) Error() string { return strings.Join(v, ", ") }

// Nothing of an attempt that was retried is left in the answer.
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

// A trigger that silently keeps a row as it is makes it a bad row: it must
// neither stop the others nor come back in every batch, nor be announced.
func TestRowsThatDoNotChange(t *testing.T) {
	t.Parallel()
	pgtest.New(t)                                    // skips before there are subtests
	for name, trigger := range map[string][2]string{ // the time of the trigger, and the body of its function
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

// A statement timeout asks for fewer rows, but accuses none.
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

// A row at the head whose trigger fails by what is no row's fault does not keep
// those behind it, even if batches are of one row.
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
