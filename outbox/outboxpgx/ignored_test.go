package outboxpgx_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
)

// ignore makes a table ignore one kind of change, for all rows or for rows that meet a condition on OLD or NEW.
func (f *fixture) ignore(t *testing.T, table, change, when string) {
	t.Helper()
	name := "ignore_" + strings.ToLower(change) + "_" + table
	if when != "" {
		when = "WHEN (" + when + ")"
	}
	f.exec(t, `CREATE FUNCTION `+name+`() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$`)
	f.exec(t, `CREATE TRIGGER `+name+` BEFORE `+change+` ON `+table+` FOR EACH ROW `+when+` EXECUTE FUNCTION `+name+`()`)
}

// refusals are the ways in which a table may refuse a change of one row: with an error of any class, including a
// failed assertion of PL/pgSQL (P0004), or with a constraint that fails at COMMIT.
var refusals = []string{"P0001", "P0004", "22001", "23503", "40002", "42501", "42P01", "54000", "55000", "55P02", "deferred"}

// refuseRows makes a table refuse changes of the rows that meet a condition. code is one of refusals, or "ignored"
// for no error.
func (f *fixture) refuseRows(t *testing.T, change, table, why, code, when string) {
	t.Helper()
	trigger, deferred, body := "TRIGGER refuse BEFORE", "", `RAISE EXCEPTION '`+why+`' USING ERRCODE = '`+code+`';`
	switch code {
	case "ignored":
		body = "RETURN NULL;"
	case "deferred":
		trigger, deferred, body = "CONSTRAINT TRIGGER refuse AFTER", "DEFERRABLE INITIALLY DEFERRED", `RAISE EXCEPTION '`+why+`';`
	}
	f.exec(t, `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN `+body+` END $$;
		CREATE `+trigger+` `+change+` ON `+table+` `+deferred+` FOR EACH ROW WHEN (`+when+`) EXECUTE FUNCTION refuse()`)
}

// heed removes the trigger of ignore.
func (f *fixture) heed(t *testing.T, table, change string) {
	t.Helper()
	f.exec(t, `DROP FUNCTION ignore_`+strings.ToLower(change)+`_`+table+` CASCADE`)
}

// ignoring lists all calls that change data, each with the table changes that it needs. If the table ignores the
// change, the call returns ErrIgnored. The changes of a settlement are listed below.
var ignoring = []struct {
	name, table, change string
	prepare             func(t *testing.T, f *fixture)
	call                func(ctx context.Context, f *fixture) error
}{
	{"write", "holdfast_outbox", "INSERT", nil, func(ctx context.Context, f *fixture) error { return f.put(ctx, 1) }},
	{"write many", "holdfast_outbox", "INSERT", nil, func(ctx context.Context, f *fixture) error { return f.put(ctx, 3) }},
	{"write by function", "holdfast_outbox", "INSERT", nil, func(ctx context.Context, f *fixture) error {
		_, err := f.pool.Exec(ctx, `SELECT holdfast_outbox_write('a', '1')`)
		return f.store.Explain(err)
	}},
	{"write once", "holdfast_outbox_dedup", "INSERT", nil, func(ctx context.Context, f *fixture) error { return f.once(ctx, "k") }},
	{"write once after the key", "holdfast_outbox_dedup", "UPDATE", func(t *testing.T, f *fixture) {
		f.exec(t, `INSERT INTO holdfast_outbox_dedup VALUES ('k', gen_random_uuid(), now() - interval '1 hour')`)
	}, func(ctx context.Context, f *fixture) error { return f.once(ctx, "k") }},
	{"claim", "holdfast_outbox_lanes", "UPDATE", written, func(ctx context.Context, f *fixture) error {
		return second(f.store.Claim(ctx, driver.Claim{Limit: 10, Lease: time.Minute}))
	}},
	{"replay", "holdfast_outbox_dead", "DELETE", withDead, replay},
	{"replay", "holdfast_outbox", "INSERT", withDead, replay},
	{"replay", "holdfast_outbox_audit", "INSERT", withDead, replay},
	{"remove", "holdfast_outbox_dead", "DELETE", withDead, remove},
	{"remove", "holdfast_outbox_audit", "INSERT", withDead, remove},
	{"retry waiting", "holdfast_outbox", "UPDATE", waiting, retryWaiting},
	{"retry waiting", "holdfast_outbox_audit", "INSERT", waiting, retryWaiting},
	{"remove waiting", "holdfast_outbox", "DELETE", waiting, removeWaiting},
	{"remove waiting", "holdfast_outbox_audit", "INSERT", waiting, removeWaiting},
	{"pause", "holdfast_outbox_pause", "INSERT", nil, func(ctx context.Context, f *fixture) error { return f.store.Pause(ctx, "ada", "") }},
	{"resume", "holdfast_outbox_pause", "DELETE", func(t *testing.T, f *fixture) { must(t, f.store.Pause(t.Context(), "ada", "")) },
		func(ctx context.Context, f *fixture) error { return f.store.Resume(ctx) }},
	{"prune", "holdfast_outbox", "DELETE", func(t *testing.T, f *fixture) {
		written(t, f)
		f.exec(t, `UPDATE holdfast_outbox SET published_at = now() - interval '1 year'`)
	}, func(ctx context.Context, f *fixture) error { return second(f.store.Prune(ctx)) }},
}

func written(t *testing.T, f *fixture) {
	f.write(t, outbox.Message{Name: "a", Key: "k", Body: []byte("1")})
}

func withDead(t *testing.T, f *fixture) {
	written(t, f)
	drainAll(t, f.givingUp(t, func(driver.Message) error {
		return &driver.PublishError{Class: driver.Permanent, Err: errors.New("no")}
	}))
}

func waiting(t *testing.T, f *fixture) {
	f.write(t, outbox.Message{Name: "a", Body: []byte("1"), NotBefore: time.Now().Add(time.Hour)})
}

func retryWaiting(ctx context.Context, f *fixture) error {
	return second(f.store.Parked().Replay(ctx, outbox.Filter{}, byAda))
}

func removeWaiting(ctx context.Context, f *fixture) error {
	return second(f.store.Parked().Remove(ctx, outbox.Filter{}, outbox.Removal{By: "ada"}))
}

func replay(ctx context.Context, f *fixture) error {
	return second(f.dead.Replay(ctx, outbox.Filter{}, byAda))
}

func remove(ctx context.Context, f *fixture) error {
	return second(f.dead.Remove(ctx, outbox.Filter{}, outbox.Removal{By: "ada"}))
}

func (f *fixture) put(ctx context.Context, n int) error {
	msgs := slices.Repeat([]outbox.Message{{Name: "a", Body: []byte("1")}}, n)
	return f.manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error { return f.store.Write(ctx, tx, msgs...) })
}

func (f *fixture) once(ctx context.Context, key string) error {
	return f.manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
		_, _, err := f.store.WriteOnce(ctx, tx, key, outbox.Message{Name: "a", Body: []byte("1")})
		return err
	})
}

// rows counts the rows of all tables except the lanes.
const rows = `SELECT (SELECT count(*) FROM holdfast_outbox) + 100 * (SELECT count(*) FROM holdfast_outbox_dead)
	+ 10000 * (SELECT count(*) FROM holdfast_outbox_audit) + 1000000 * (SELECT count(*) FROM holdfast_outbox_dedup WHERE expires_at > now())`

func TestIgnoredChange_isAnErrorAndChangesNothing(t *testing.T) {
	t.Parallel()
	pgtest.New(t) // skips before there are subtests
	for _, c := range ignoring {
		t.Run(c.name+" "+c.change+" "+c.table, func(t *testing.T) {
			t.Parallel()
			f := setup(t, outboxpgx.Config{Retention: time.Hour})
			if c.prepare != nil {
				c.prepare(t, f)
			}
			var before, after int
			f.scan(t, rows, &before)
			f.ignore(t, c.table, c.change, "")
			if err := c.call(t.Context(), f); !errors.Is(err, outboxpgx.ErrIgnored) || !strings.Contains(err.Error(), c.table) {
				t.Errorf("the error is %v, want ErrIgnored of %s", err, c.table)
			}
			f.scan(t, rows, &after)
			if after != before {
				t.Errorf("rows: %d, want %d as before", after, before)
			}
			if err := f.store.Check(t.Context()); err == nil || !strings.Contains(err.Error(), "of table "+c.table+" may drop changes") {
				t.Errorf("Check returns %v, want the trigger", err)
			}
			f.heed(t, c.table, c.change)
			must(t, c.call(t.Context(), f))
		})
	}
}

// If a trigger stored a key elsewhere, WriteOnce does not mistake that row for another call's key.
func TestWriteOnce_routedKeyIsIgnored(t *testing.T) {
	t.Parallel()
	pgtest.New(t) // skips before there are subtests
	const insert, child = `INSERT INTO routed VALUES (NEW.*);`, `CREATE TABLE routed () INHERITS (holdfast_outbox_dedup);`
	for name, c := range map[string]struct{ table, body string }{
		"child":              {child, insert},
		"child in savepoint": {child, `BEGIN ` + insert + ` EXCEPTION WHEN undefined_table THEN RAISE; END;`},
		"same table":         {"", `IF pg_trigger_depth() > 1 THEN RETURN NEW; END IF; INSERT INTO holdfast_outbox_dedup VALUES (NEW.*);`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t, outboxpgx.Config{})
			f.exec(t, c.table+`CREATE FUNCTION route() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN `+c.body+` RETURN NULL; END $$;
				CREATE TRIGGER route BEFORE INSERT ON holdfast_outbox_dedup FOR EACH ROW EXECUTE FUNCTION route()`)
			inSavepoint := func(ctx context.Context, f *fixture) error {
				return f.manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
					return pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
						_, _, err := f.store.WriteOnce(ctx, tx, "k", outbox.Message{Name: "a", Body: []byte("1")})
						return err
					})
				})
			}
			for _, err := range []error{f.once(t.Context(), "k"), inSavepoint(t.Context(), f)} {
				if !errors.Is(err, outboxpgx.ErrIgnored) || !strings.Contains(err.Error(), "holdfast_outbox_dedup") {
					t.Errorf("the error is %v, want ErrIgnored", err)
				}
			}
			var left int
			f.scan(t, rows, &left)
			if left != 0 {
				t.Errorf("rows: %d, want none", left)
			}
		})
	}
}

// A key may be written twice in one transaction, also with the same id.
func TestWriteOnce_twiceInOneTransaction(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	m := outbox.Message{ID: uuid.Must(uuid.NewV7()), Name: "a", Body: []byte("1")}
	for _, firsts := range [][]bool{{true, false}, {false, false}} {
		must(t, f.manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
			for _, want := range firsts {
				if id, first, err := f.store.WriteOnce(ctx, tx, "k", m); err != nil || id != m.ID || first != want {
					t.Errorf("WriteOnce returns %v, %v, %v, want %v", id, first, err, want)
				}
			}
			return nil
		}))
	}
}

// outcomes are the outcomes of a message, and the table changes that could record them.
var outcomes = []struct {
	name    string
	verdict driver.Verdict
	ignored [][2]string // table and kind of change
	marked  bool        // the message is marked as published instead of the change
}{
	{"published", driver.Published, [][2]string{{"holdfast_outbox", "DELETE"}}, true},
	{"published, not markable", driver.Published, [][2]string{{"holdfast_outbox", "DELETE"}, {"holdfast_outbox", "UPDATE"}}, false},
	{"failed", driver.Failed, [][2]string{{"holdfast_outbox", "UPDATE"}}, false},
	{"dead, not deletable", driver.Dead, [][2]string{{"holdfast_outbox", "DELETE"}}, false},
	{"dead, not storable", driver.Dead, [][2]string{{"holdfast_outbox_dead", "INSERT"}}, false},
}

// A message whose outcome the table ignores is not published again. The outcomes of the rest of its batch are
// recorded. Its own outcome is recorded as soon as the table accepts it.
func TestIgnoredOutcome_isNotPublishedAgain(t *testing.T) {
	t.Parallel()
	pgtest.New(t) // skips before there are subtests
	for _, c := range outcomes {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			f := setup(t, outboxpgx.Config{})
			for n := range 4 {
				f.write(t, outbox.Message{Name: fmt.Sprintf("a.%d", n), Key: fmt.Sprint("k", n%2), Body: []byte("1")})
			}
			for _, i := range c.ignored {
				row := "OLD"
				if i[1] == "INSERT" {
					row = "NEW"
				}
				f.ignore(t, i[0], i[1], row+`.name = 'a.0'`)
			}
			batch, err := f.store.Claim(t.Context(), driver.Claim{Limit: 10, Lease: time.Minute})
			must(t, err)
			settled := f.settleAll(t, batch, c.verdict)
			if (settled.Refused == nil) != c.marked || !c.marked && !errors.Is(settled.Refused, outboxpgx.ErrIgnored) && !strings.Contains(settled.Refused.Error(), "HF001") {
				t.Errorf("Refused is %v", settled.Refused)
			}
			f.wantStuck(t, c.verdict, c.marked)
			for _, i := range c.ignored {
				f.heed(t, i[0], i[1])
			}
			f.store.RetryRefused()
			again, err := f.store.Claim(t.Context(), driver.Claim{Limit: 10, Lease: time.Minute})
			must(t, err)
			if len(again.Messages) > 0 {
				t.Errorf("%d messages are published again", len(again.Messages))
			}
			_, err = f.store.Claim(t.Context(), driver.Claim{Limit: 10, Lease: time.Minute}) // checks the row
			must(t, err)
			f.wantStuck(t, c.verdict, true)
		})
	}
}

// wantStuck checks that a claim returns no message, and whether all outcomes are recorded.
func (f *fixture) wantStuck(t *testing.T, verdict driver.Verdict, recorded bool) {
	t.Helper()
	batch, err := f.store.Claim(t.Context(), driver.Claim{Limit: 10, Lease: time.Minute})
	must(t, err)
	if len(batch.Messages) > 0 || (batch.Refused == nil) != recorded {
		t.Errorf("claimed %d messages, Refused: %v", len(batch.Messages), batch.Refused)
	}
	var ready, waiting, dead int
	f.scan(t, `SELECT count(*) FILTER (WHERE published_at IS NULL AND due_at IS NULL), count(*) FILTER (WHERE published_at IS NULL AND due_at IS NOT NULL),
		(SELECT count(*) FROM holdfast_outbox_dead) FROM holdfast_outbox`, &ready, &waiting, &dead)
	want := map[driver.Verdict][2]int{driver.Published: {0, 0}, driver.Failed: {4, 0}, driver.Dead: {0, 4}}[verdict]
	stuck := 0
	if !recorded {
		stuck = 1
		for i, n := range want {
			want[i] = max(0, n-1)
		}
	}
	if ready != stuck || waiting != want[0] || dead != want[1] {
		t.Errorf("%d ready, %d wait, %d dead, want %d, %v", ready, waiting, dead, stuck, want)
	}
}

func (f *fixture) settleAll(t *testing.T, batch driver.Batch, verdict driver.Verdict) driver.Settled {
	t.Helper()
	var outcomes []driver.Settlement
	for _, m := range batch.Messages {
		outcomes = append(outcomes, driver.Settlement{ID: m.ID, Verdict: verdict, Delay: time.Hour, Class: driver.Permanent, Err: "no"})
	}
	settled, err := f.store.Settle(t.Context(), batch, outcomes)
	must(t, err)
	return settled
}

// If the server refuses a batch because of one message, all its other outcomes are recorded, whatever the error.
func TestRefusedOutcome_leavesTheOthers(t *testing.T) {
	t.Parallel()
	pgtest.New(t) // skips before there are subtests
	for _, code := range refusals {
		for _, verdict := range []driver.Verdict{driver.Published, driver.Failed, driver.Dead} {
			t.Run(fmt.Sprint(code, " ", verdict), func(t *testing.T) {
				t.Parallel()
				f := setup(t, outboxpgx.Config{})
				for n := range 4 {
					f.write(t, outbox.Message{Name: fmt.Sprintf("a.%d", n), Key: fmt.Sprint("k", n%2), Body: []byte("1")})
				}
				f.refuseRows(t, "DELETE OR UPDATE", "holdfast_outbox", "not a.1", code, `OLD.name = 'a.1'`)
				batch, err := f.store.Claim(t.Context(), driver.Claim{Limit: 10, Lease: time.Minute})
				must(t, err)
				if settled := f.settleAll(t, batch, verdict); settled.Refused == nil || !strings.Contains(settled.Refused.Error(), "not a.1") {
					t.Errorf("Refused is %v", settled.Refused)
				}
				f.wantStuck(t, verdict, false)
			})
		}
	}
}

// A relay with a message whose outcome is refused continues, but is not ready.
func TestRelay_isNotReadyWithRefusedOutcomes(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	f.ignore(t, "holdfast_outbox", "DELETE", "OLD.name = 'a'")
	f.ignore(t, "holdfast_outbox", "UPDATE", "OLD.name = 'a'")
	publisher := outboxtest.NewPublisher()
	relay := f.relay(t, publisher, outbox.RelayConfig{})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- relay.Run(ctx) }()
	written(t, f)
	untilReceived(t, publisher, 1)
	until(t, "the relay is ready", func() bool { return errors.Is(relay.Ready(t.Context()), outboxpgx.ErrIgnored) })
	f.write(t, outbox.Message{Name: "b", Key: "k", Body: []byte("1")})
	untilReceived(t, publisher, 2)
	f.heed(t, "holdfast_outbox", "DELETE")
	f.store.RetryRefused()
	f.store.Wake()
	untilReady(t, f, relay)
	cancel()
	<-done
	var names []string
	for _, m := range publisher.Received() {
		names = append(names, m.Name)
	}
	if !slices.Equal(names, []string{"a", "b"}) {
		t.Errorf("received %q, want each once", names)
	}
}

// untilReady waits until the relay is ready and its outbox is empty.
func untilReady(t *testing.T, f *fixture, relay *outbox.Relay) {
	t.Helper()
	until(t, "the relay is not ready", func() bool { return relay.Ready(t.Context()) == nil })
	f.untilTrue(t, "rows are left", `SELECT NOT EXISTS (SELECT FROM holdfast_outbox)`)
}

// An ignored renewal is an error. So is an ignored release; the lane is free when the lease expires.
func TestIgnoredLease_isAnError(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	written(t, f)
	batch, err := f.store.Claim(t.Context(), driver.Claim{Limit: 10, Lease: time.Minute})
	must(t, err)
	f.ignore(t, "holdfast_outbox_lanes", "UPDATE", "")
	if _, err := f.store.Renew(t.Context(), batch.Leases, time.Minute); !errors.Is(err, outboxpgx.ErrIgnored) {
		t.Errorf("Renew returns %v", err)
	}
	if settled := f.settleAll(t, batch, driver.Published); !errors.Is(settled.Refused, outboxpgx.ErrIgnored) {
		t.Errorf("Refused is %v", settled.Refused)
	}
}

// Waiting messages that the table does not release are reported, and do not block other messages.
func TestIgnoredRelease_leavesTheOthers(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	f.write(t, outbox.Message{Name: "a", Key: "k", Body: []byte("1")}, outbox.Message{Name: "b", Key: "k", Body: []byte("1")})
	f.exec(t, `UPDATE holdfast_outbox SET due_at = now() + interval '1 hour' WHERE name = 'a'`)
	f.ignore(t, "holdfast_outbox", "UPDATE", "OLD.name IN ('a', 'b')")
	f.write(t, outbox.Message{Name: "c", Key: "other", Body: []byte("1")})
	batch, err := f.store.Claim(t.Context(), driver.Claim{Limit: 10, Lease: time.Minute})
	must(t, err)
	if len(batch.Messages) != 1 || batch.Messages[0].Name != "c" || !errors.Is(batch.Refused, outboxpgx.ErrIgnored) {
		t.Errorf("claimed %+v, Refused: %v", batch.Messages, batch.Refused)
	}
}

// If the server does not release one due message, it does not block the others. It is tried again.
func TestRefusedRelease_leavesTheOthers(t *testing.T) {
	t.Parallel()
	pgtest.New(t) // skips before there are subtests
	for _, code := range append([]string{"ignored"}, refusals...) {
		t.Run(code, func(t *testing.T) {
			t.Parallel()
			f := setup(t, outboxpgx.Config{})
			for n := range 6 {
				f.write(t, outbox.Message{Name: fmt.Sprintf("a.%d", n), Body: []byte("1"), NotBefore: time.Now().Add(time.Hour)})
			}
			f.exec(t, `UPDATE holdfast_outbox SET due_at = now() - interval '1 s'`)
			f.refuseRows(t, "UPDATE", "holdfast_outbox", "not due", code, `OLD.name IN ('a.1', 'a.4')`)
			publisher := outboxtest.NewPublisher()
			_, err := f.relay(t, publisher, outbox.RelayConfig{}).Drain(t.Context(), outbox.Bounds{})
			if n := len(publisher.Received()); n != 4 || err == nil || !strings.Contains(err.Error(), "release 2 due messages") {
				t.Errorf("%d messages received, %v, want the other 4 and the reason", n, err)
			}
			batch, err := f.store.Claim(t.Context(), driver.Claim{Limit: 10, Lease: time.Minute})
			must(t, err)
			if batch.Refused == nil || !strings.Contains(batch.Refused.Error(), "release 2 due messages") || batch.Due != time.Second {
				t.Errorf("Refused: %v, due in %v", batch.Refused, batch.Due)
			}
			f.exec(t, `DROP FUNCTION refuse CASCADE`)
			f.store.RetryRefused()
			drainAll(t, f.relay(t, publisher, outbox.RelayConfig{}))
			if n := len(publisher.Received()); n != 6 {
				t.Errorf("%d messages received in the end, want 6", n)
			}
		})
	}
}

// A relay is not ready if row-level security hides the messages from it.
func TestHiddenRows_areTold(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	written(t, f)
	hidden := f.withoutBypass(t)
	f.exec(t, `ALTER TABLE holdfast_outbox ENABLE ROW LEVEL SECURITY`)
	batch, err := hidden.Claim(t.Context(), driver.Claim{Limit: 10, Lease: time.Minute})
	must(t, err)
	if len(batch.Messages) > 0 || batch.Refused == nil || !strings.Contains(batch.Refused.Error(), "row-level security of table holdfast_outbox") {
		t.Errorf("claimed %d messages, Refused: %v", len(batch.Messages), batch.Refused)
	}
}

// withoutBypass returns a Store whose role has only the privileges of a relay.
func (f *fixture) withoutBypass(t *testing.T) *outboxpgx.Store {
	t.Helper()
	role := "relay_" + strings.ReplaceAll(uuid.NewString(), "-", "")
	f.exec(t, `CREATE ROLE `+role)
	t.Cleanup(func() {
		_, err := f.pool.Exec(context.Background(), `DROP OWNED BY `+role)
		_, err2 := f.pool.Exec(context.Background(), `DROP ROLE `+role)
		must(t, errors.Join(err, err2))
	})
	var schema string
	f.scan(t, `SELECT quote_ident(current_schema())`, &schema)
	f.exec(t, `GRANT USAGE ON SCHEMA `+schema+` TO `+role)
	for _, grant := range f.store.Grants("relay") {
		f.exec(t, `GRANT `+grant+` TO `+role)
	}
	cfg := f.pool.Config()
	cfg.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, `SET ROLE `+role)
		return err
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	must(t, err)
	t.Cleanup(pool.Close)
	return fixtureOn(t, pool, outboxpgx.Config{}).store
}

// A dead letter that cannot be returned or removed does not block the others. The error names it, and the audit
// counts the others.
func TestRefusedDeadLetter_leavesTheOthers(t *testing.T) {
	t.Parallel()
	pgtest.New(t) // skips before there are subtests
	changes := map[string]func(t *testing.T, f *fixture) (int, error){
		"replay": func(t *testing.T, f *fixture) (int, error) {
			r, err := f.dead.Replay(t.Context(), outbox.Filter{}, byAda)
			if r.Failed != 1 {
				t.Errorf("%d have failed, want 1", r.Failed)
			}
			return r.Returned, err
		},
		"edit": func(t *testing.T, f *fixture) (int, error) {
			r, err := f.dead.Replay(t.Context(), outbox.Filter{}, outbox.Replay{By: "ada", Edit: func(m outbox.Message) ([]byte, error) { return m.Body, nil }})
			return r.Returned, err
		},
		"remove": func(t *testing.T, f *fixture) (int, error) {
			return f.dead.Remove(t.Context(), outbox.Filter{}, outbox.Removal{By: "ada"})
		},
	}
	for name, change := range changes {
		for _, code := range append([]string{"ignored"}, refusals...) {
			t.Run(name+" "+code, func(t *testing.T) {
				t.Parallel()
				f, ids := withDeadLetters(t)
				f.refuseRows(t, "DELETE", "holdfast_outbox_dead", "not b", code, `OLD.name = 'b'`)
				n, err := change(t, f)
				if n != 2 || err == nil || !strings.Contains(err.Error(), ids["b"].String()) {
					t.Errorf("%d are changed, %v, want 2, and the other named", n, err)
				}
				entries, err := f.store.Audit(t.Context(), 0)
				must(t, err)
				if letters, err := f.dead.List(t.Context(), outbox.Filter{}); err != nil || len(letters) != 1 || len(entries) != 1 || entries[0].Count != 2 {
					t.Errorf("%d letters left, audit %+v, %v", len(letters), entries, err)
				}
			})
		}
	}
}
