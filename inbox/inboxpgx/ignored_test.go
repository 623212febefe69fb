package inboxpgx_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	pgdriver "github.com/holdfast-go/holdfast/inbox/inboxpgx/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// ignore makes a table ignore a kind of change. The body of the trigger's function returns null for a row to
// ignore, as RETURN NEW does in a trigger on DELETE.
func ignore(t *testing.T, pool *pgxpool.Pool, table, change, body string) {
	t.Helper()
	exec(t, pool, `CREATE OR REPLACE FUNCTION ignored() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN `+body+` END $$`)
	exec(t, pool, `CREATE TRIGGER ignoring BEFORE `+change+` ON `+table+` FOR EACH ROW EXECUTE FUNCTION ignored()`)
}

func wantIgnored(t *testing.T, err error) {
	t.Helper()
	if f := driver.Classify(err); !errors.Is(err, inboxpgx.ErrIgnored) || !f.Unavailable || f.Counted {
		t.Errorf("a message without entry: %v classified %+v", err, f)
	}
}

// If a table drops entries, new messages do not count as duplicates, however the row was lost: alone and in
// batches, beside a duplicate, with stopped keys, and at every isolation level.
func TestIgnoredEntry_isNoDuplicate(t *testing.T) {
	t.Parallel()
	const partitioned = `CREATE TABLE part (LIKE holdfast_inbox INCLUDING ALL) INHERITS (holdfast_inbox)`
	for name, body := range map[string]string{
		"dropped":              `RETURN NULL;`,
		"partitioned":          `INSERT INTO part SELECT NEW.*; RETURN NULL;`,
		"partitioned, guarded": `BEGIN INSERT INTO part SELECT NEW.*; EXCEPTION WHEN undefined_table THEN RAISE; END; RETURN NULL;`,
	} {
		for _, isolation := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.Serializable} {
			t.Run(name+" "+string(isolation), func(t *testing.T) {
				t.Parallel()
				pool := newPool(t)
				p := newStore(t, newManager(t, pool), "a", inboxpgx.Config{Isolation: isolation})
				p.Park(driver.ConsumerDefaults(inbox.ConsumerConfig{Ordered: true, ParkKeys: true}, "orders"))
				handle(t, p, func(ctx context.Context, tx pgx.Tx, e conformance.Event) error {
					return insertEffect(ctx, tx, "a", e.Number)
				})
				known := event()
				noError(t, process(t, p, known))
				exec(t, pool, partitioned)
				ignore(t, pool, "holdfast_inbox", "INSERT", body)

				keyed := func() *inbox.Message {
					m := event()
					m.Key = "k"
					return m
				}
				wantIgnored(t, process(t, p, event()))
				wantIgnored(t, process(t, p, keyed()))
				noError(t, process(t, p, known))
				results := p.Process(t.Context(), []*inbox.Message{event(), known, keyed()})
				wantIgnored(t, results[0])
				noError(t, results[1])
				wantIgnored(t, results[2])
				wantOneEffectEach(t, pool, 1)
			})
		}
	}
}

// A trigger that ignores some entries delays only their messages.
func TestIgnoredEntry_leavesTheOthers(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	p := effectStore(t, newManager(t, pool))
	msgs := events(4)
	ignore(t, pool, "holdfast_inbox", "INSERT", `IF NEW.message_id = '`+msgs[2].ID.String()+`' THEN RETURN NULL; END IF; RETURN NEW;`)
	results := p.Process(t.Context(), msgs)
	wantIgnored(t, results[2])
	if got := failedOnes(results); !slices.Equal(got, []int{2}) {
		t.Errorf("failed %v, want the third one", got)
	}
	wantOneEffectEach(t, pool, 3)
}

// A consumer whose entries are ignored pauses and gives the reason, and continues when they are stored again.
func TestIgnoredEntry_pausesTheConsumer(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	p := effectStore(t, newManager(t, pool))
	ignore(t, pool, "holdfast_inbox", "INSERT", `RETURN NULL;`)
	broker := inboxtest.NewBroker()
	consumer, err := inboxtest.NewConsumer(broker, inboxtest.Queue{Name: "orders"}, p, inbox.ConsumerConfig{Logger: slog.New(slog.DiscardHandler)})
	noError(t, err)
	for _, m := range events(5) {
		noError(t, broker.Send(t.Context(), m))
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- consumer.Run(ctx) }()
	testenv.Eventually(t, func() error {
		if err := consumer.Ready(t.Context()); !errors.Is(err, inboxpgx.ErrIgnored) {
			return fmt.Errorf("Ready = %w", err)
		}
		return nil
	})
	if err := p.Check(t.Context()); err == nil || !strings.Contains(err.Error(), "trigger ignoring of table holdfast_inbox") {
		t.Errorf("Check = %v", err)
	}
	exec(t, pool, `DROP TRIGGER ignoring ON holdfast_inbox`)
	noError(t, broker.Idle(t.Context()))
	wantOneEffectEach(t, pool, 5)
	cancel()
	noError(t, <-ended)
}

// If the entry of a failed message of a batch cannot be deleted, nothing is committed: otherwise its retry
// would count as a duplicate.
func TestIgnoredForget_commitsNothing(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	p := newStore(t, newManager(t, pool), "a", inboxpgx.Config{})
	handle(t, p, func(ctx context.Context, tx pgx.Tx, e conformance.Event) error {
		if e.Number == 1 {
			return errors.New("broken")
		}
		return insertEffect(ctx, tx, "a", e.Number)
	})
	ignore(t, pool, "holdfast_inbox", "DELETE", `RETURN NEW;`)
	for _, err := range p.Process(t.Context(), events(3)) {
		wantIgnored(t, err)
	}
	wantOneEffectEach(t, pool, 0)
}

// Every statement of the ledger and of the parked messages returns an error if the table ignores it, and none
// if there was nothing to change.
func TestIgnoredNotes(t *testing.T) {
	t.Parallel()
	for _, change := range []string{"INSERT", "UPDATE", "DELETE"} {
		t.Run(change, func(t *testing.T) {
			t.Parallel()
			testIgnoredNotes(t, change)
		})
	}
}

func testIgnoredNotes(t *testing.T, change string) {
	pool := newPool(t)
	p := newStore(t, newManager(t, pool), "a", inboxpgx.Config{})
	n := newNotes(p)
	statements := n.prepare(t)
	for _, table := range []string{"holdfast_inbox", "holdfast_inbox_attempts", "holdfast_inbox_stopped", "holdfast_inbox_waiting", "holdfast_inbox_pause"} {
		ignore(t, pool, table, change, `RETURN NULL;`)
	}
	for _, s := range statements {
		err := s.call(t.Context())
		if want := strings.Contains(s.does, change); errors.Is(err, inboxpgx.ErrIgnored) != want || !want && err != nil {
			t.Errorf("%s where %s is ignored: %v", s.name, change, err)
		}
	}
}

// notes are the ledger, the parked messages and the pause of one consumer.
type notes struct {
	p       *inboxpgx.Store
	ledger  driver.Ledger
	parking pgdriver.Parking
}

// statement is a call, and the kinds of changes in its SQL.
type statement struct {
	name, does string
	call       func(context.Context) error
}

func newNotes(p *inboxpgx.Store) notes {
	return notes{p, p.Ledger(), p.Entries().Parking("a")}
}

// prepare stores the rows that the statements change, and returns the statements.
func (n notes) prepare(t *testing.T) []statement {
	t.Helper()
	ctx := t.Context()
	noted, stopped, dropped := event(), dead(event()), dead(event())
	dropped.Class = "validation"
	waiting := event()
	noError(t, n.ledger.Start(ctx, noted))
	noError(t, n.parking.Stop(ctx, "stopped", stopped))
	noError(t, n.parking.Stop(ctx, "dropped", dropped))
	wait(t, n.parking, "stopped", waiting)
	heads := map[string]*pgdriver.Head{}
	for _, key := range []string{"retried", "failed", "done", "again", "free"} {
		letter := dead(event())
		letter.Class = "old"
		noError(t, n.parking.Stop(ctx, key, letter))
		if key != "free" {
			wait(t, n.parking, key, event())
		}
		noError(t, n.parking.Scan(ctx, "old", func(*inbox.DeadLetter) (driver.Outcome, error) { return driver.Drop, nil }, nil))
		h, err := n.parking.Claim(ctx, time.Hour)
		noError(t, err)
		heads[key] = h
	}
	scan := func(class string, fate driver.Outcome) func(context.Context) error {
		return func(ctx context.Context) (failure error) {
			err := n.parking.Scan(ctx, class, func(*inbox.DeadLetter) (driver.Outcome, error) { return fate, nil },
				func(_ inbox.DeadLetter, err error) { failure = err })
			return errors.Join(err, failure)
		}
	}
	return []statement{
		{"Ledger.Start", "INSERT", func(ctx context.Context) error { return n.ledger.Start(ctx, event()) }},
		{"Ledger.Pass", "INSERT", func(ctx context.Context) error { return n.ledger.Pass(ctx, event(), time.Hour) }},
		{"Ledger.End", "UPDATE", func(ctx context.Context) error { return n.ledger.End(ctx, noted) }},
		{"Ledger.End of nothing", "", func(ctx context.Context) error { return n.ledger.End(ctx, event()) }},
		{"Ledger.Forget", "DELETE", func(ctx context.Context) error { return n.ledger.Forget(ctx, noted.ID) }},
		{"Ledger.Forget of nothing", "", func(ctx context.Context) error { return n.ledger.Forget(ctx, ids.New()) }},
		{"Parking.Wait", "INSERT", func(ctx context.Context) error {
			_, err := n.parking.Wait(ctx, "stopped", event(), false)
			return err
		}},
		{"Parking.Wait again", "", func(ctx context.Context) error {
			_, err := n.parking.Wait(ctx, "stopped", waiting, false)
			return err
		}},
		{"Parking.Stop", "INSERT", func(ctx context.Context) error { return n.parking.Stop(ctx, "new", dead(event())) }},
		{"Parking.Next", "DELETE, UPDATE", func(ctx context.Context) error {
			_, err := n.parking.Next(ctx, heads["done"], time.Hour)
			return err
		}},
		{"Parking.Claim of nothing", "", func(ctx context.Context) error {
			_, err := n.parking.Claim(ctx, time.Hour)
			return err
		}},
		{"Parking.Retry", "UPDATE", func(ctx context.Context) error {
			return n.parking.Retry(ctx, heads["retried"], heads["retried"].Message, time.Hour)
		}},
		{"Parking.Fail", "UPDATE", func(ctx context.Context) error {
			return n.parking.Fail(ctx, heads["failed"], dead(heads["failed"].Message))
		}},
		{"Parking.Release", "UPDATE", func(ctx context.Context) error { return n.parking.Release(ctx, heads["again"]) }},
		{"Parking.Release of the last", "DELETE", func(ctx context.Context) error { return n.parking.Release(ctx, heads["free"]) }},
		{"Parking.Scan, Return", "UPDATE", scan(stopped.Class, driver.Return)},
		{"Parking.Scan, Drop", "INSERT, DELETE, UPDATE", scan(dropped.Class, driver.Drop)},
		{"Pause", "INSERT", func(ctx context.Context) error { return n.p.Pause(ctx, "ops", "test") }},
		{"Resume", "DELETE", func(ctx context.Context) error { return n.p.Resume(ctx) }},
		{"Resume again", "", func(ctx context.Context) error {
			if err := n.p.Resume(ctx); !errors.Is(err, inboxpgx.ErrIgnored) {
				return err
			}
			return nil
		}},
	}
}

// dead returns a message as a dead letter.
func dead(m *inbox.Message) inbox.DeadLetter {
	return inbox.DeadLetter{Message: *m, Class: "default", FailedAt: time.Now()}
}
