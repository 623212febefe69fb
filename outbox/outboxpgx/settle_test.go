package outboxpgx_test

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
)

// A message that commits during a settlement is found. The relay woken for it found the lane leased, so the
// settlement reports More.
func TestSettle_checksForMoreAfterCommit(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	f.write(t, outbox.Message{Name: "first", Key: "k", Body: []byte("1")})
	batch, err := f.store.Claim(t.Context(), driver.Claim{Limit: 10, Lease: time.Minute})
	must(t, err)
	goOn := f.holdUpCommits(t)
	type result struct {
		settled driver.Settled
		err     error
	}
	results := make(chan result, 1)
	go func() {
		settled, err := f.store.Settle(t.Context(), batch, []driver.Settlement{{ID: batch.Messages[0].ID, Verdict: driver.Published}})
		results <- result{settled, err}
	}()
	f.untilTrue(t, "the settlement does not commit yet", `SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = 'holdfast_outbox'::regclass AND NOT granted)`)
	f.write(t, outbox.Message{Name: "second", Key: "k", Body: []byte("1")})
	other, err := f.store.Claim(t.Context(), driver.Claim{Limit: 10, Lease: time.Minute})
	must(t, err)
	if len(other.Messages) > 0 {
		t.Fatal("the lane is free before the commit")
	}
	goOn()
	r := <-results
	must(t, r.err)
	if !r.settled.More || len(r.settled.Stale) > 0 {
		t.Errorf("%+v, want More", r.settled)
	}
}

// holdUpCommits makes every transaction that deletes messages wait at its COMMIT, until goOn is called.
func (f *fixture) holdUpCommits(t *testing.T) (goOn func()) {
	t.Helper()
	f.exec(t, `
		CREATE FUNCTION hold_up() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_advisory_xact_lock('holdfast_outbox'::regclass::oid::bigint); RETURN NULL; END $$;
		CREATE CONSTRAINT TRIGGER hold_up AFTER DELETE ON holdfast_outbox DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION hold_up()`)
	tx, err := f.pool.Begin(t.Context())
	must(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	_, err = tx.Exec(t.Context(), `SELECT pg_advisory_xact_lock('holdfast_outbox'::regclass::oid::bigint)`)
	must(t, err)
	return func() { must(t, tx.Rollback(t.Context())) }
}

// A claim may leave a doubtful lane behind, because a sound one has waited longer. It then reports this. Otherwise
// the messages of a killed relay would wait for the next poll.
func TestClaim_reportsDoubtfulLaneLeftBehind(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	f.write(t, outbox.Message{Name: "lost", Key: "a", Body: []byte("1")})
	lost, err := f.store.Claim(t.Context(), driver.Claim{Limit: 10, Lease: 100 * time.Millisecond, Alone: true})
	must(t, err)
	if len(lost.Messages) != 1 {
		t.Fatalf("claimed %d messages, want 1", len(lost.Messages))
	}
	f.untilTrue(t, "the lease goes on", "SELECT bool_and(lease_until <= now()) FROM holdfast_outbox_lanes WHERE token IS NOT NULL")
	sound := "b"
	for driver.LaneOf(driver.Message{Key: sound}) == lost.Leases[0].Lane {
		sound += "b"
	}
	f.write(t, outbox.Message{Name: "sound", Key: sound, Body: []byte("1")})
	batch, err := f.store.Claim(t.Context(), driver.Claim{Limit: 10, Lease: time.Minute, Alone: true})
	must(t, err)
	if len(batch.Messages) != 1 || batch.Messages[0].Name != "sound" || !batch.Suspect {
		t.Errorf("claimed %d messages, suspect: %v, want the sound one and Suspect for the other lane", len(batch.Messages), batch.Suspect)
	}
}

// A committed settlement succeeds even if the check for more messages fails.
func TestSettle_committedDespiteFailedCheckForMore(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	f.write(t, outbox.Message{Name: "first", Key: "k", Body: []byte("1")})
	batch, err := f.store.Claim(t.Context(), driver.Claim{Limit: 10, Lease: time.Minute})
	must(t, err)
	f.exec(t, `DROP FUNCTION holdfast_outbox_look;
		CREATE FUNCTION holdfast_outbox_look(smallint[]) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE query_canceled; END $$`)
	settled, err := f.store.Settle(t.Context(), batch, []driver.Settlement{{ID: batch.Messages[0].ID, Verdict: driver.Published}})
	must(t, err)
	if !settled.More || len(settled.Stale) > 0 {
		t.Errorf("%+v, want More and no stale lease", settled)
	}
	depth, err := f.store.Depth(t.Context())
	must(t, err)
	if depth.Ready != 0 {
		t.Errorf("%d messages are left", depth.Ready)
	}
}

// A claim that is cancelled as a whole is not sent again. Only a cancelled scan below the floors is left out.
func TestCancelledClaimIsSentOnce(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	f.exec(t, `DROP FUNCTION holdfast_outbox_claim;
		CREATE SEQUENCE claims;
		CREATE FUNCTION holdfast_outbox_claim(bigint, bigint, integer, text[], integer, boolean, bigint[])
			RETURNS TABLE (lane smallint, single boolean, doubtful boolean, era bigint, due_us bigint, ends_us bigint, dropped bigint)
			LANGUAGE plpgsql AS $$ BEGIN PERFORM nextval('claims'); RAISE query_canceled; END $$`)
	if _, err := f.store.Claim(t.Context(), driver.Claim{Limit: 10, Lease: time.Minute}); err == nil {
		t.Error("the claim has worked")
	}
	var claims int
	f.scan(t, "SELECT last_value FROM claims", &claims)
	if claims != 1 {
		t.Errorf("%d claims were sent, want 1", claims)
	}
}

// Leases are renewed while the process uses every connection of the pool for other work.
func TestRenew_besideAFullPool(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	written(t, f)
	batch, err := f.store.Claim(t.Context(), driver.Claim{Limit: 10, Lease: time.Minute})
	must(t, err)
	for range f.pool.Config().MaxConns {
		conn, err := f.pool.Acquire(t.Context())
		must(t, err)
		defer conn.Release()
	}
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
	defer cancel()
	if stale, err := f.store.Renew(ctx, batch.Leases, time.Minute); err != nil || len(stale) > 0 {
		t.Errorf("Renew: %d leases are lost, error %v", len(stale), err)
	}
}

// lockRow starts a session that changes a message and stays open until unlock is called.
func (f *fixture) lockRow(t *testing.T, key, body string) (unlock func()) {
	t.Helper()
	tx, err := f.pool.Begin(t.Context())
	must(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	tag, err := tx.Exec(t.Context(), `UPDATE holdfast_outbox SET headers = NULL WHERE ordering_key = $1 AND body = $2`, key, []byte(body))
	must(t, err)
	if tag.RowsAffected() != 1 {
		t.Fatalf("%d rows are locked, want 1", tag.RowsAffected())
	}
	return func() { must(t, tx.Commit(t.Context())) }
}

// failingOnce returns a publisher that rejects its first message, and a relay that retries after delay.
func (f *fixture) failingOnce(t *testing.T, delay time.Duration) (*outboxtest.Publisher, *outbox.Relay) {
	t.Helper()
	publisher := outboxtest.NewPublisher()
	publisher.Script(errors.New("once"))
	return publisher, f.relay(t, publisher, outbox.RelayConfig{Retry: outbox.RetryPolicy{BaseDelay: delay, MaxDelay: delay}})
}

// sharing returns another key of the key's lane.
func sharing(key string) string {
	other := key
	for {
		other += "'"
		if driver.LaneOf(driver.Message{Key: other}) == driver.LaneOf(driver.Message{Key: key}) {
			return other
		}
	}
}

// If a session has locked a message that waits for its next attempt, or one held behind it, only that key waits.
func TestWaitingRowLockedElsewhere(t *testing.T) {
	t.Parallel()
	for _, locked := range []string{"0", "2"} {
		t.Run(locked, func(t *testing.T) {
			t.Parallel()
			f := setup(t, outboxpgx.Config{})
			publisher, relay := f.failingOnce(t, time.Hour)
			f.write(t, keyed(1, 4)...)
			drainAll(t, relay) // one fails, three are held behind it
			f.exec(t, `UPDATE holdfast_outbox SET due_at = now() WHERE NOT held`)
			unlock := f.lockRow(t, "key-0", locked)
			for n := range 3 {
				f.write(t, outbox.Message{Name: "other", Key: sharing("key-0"), Body: []byte(strconv.Itoa(n))})
				drain(t, relay, 1)
			}
			wantKey(t, publisher, "key-0")
			unlock()
			report, err := relay.Drain(t.Context(), outbox.Bounds{Limit: 4, TimeLimit: testenv.Patience})
			must(t, err)
			wantKey(t, publisher, "key-0", "0", "1", "2", "3")
			if report.Published != 4 {
				t.Errorf("%+v", report)
			}
		})
	}
}

// A session has locked the message behind a waiting one. The waiting one is not removed, because only its release makes the
// other ready soon.
func TestRemove_lockedBehind(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	publisher, relay := f.failingOnce(t, time.Hour)
	f.write(t, keyed(2, 3)...)
	drain(t, relay, 3) // the first one of a key fails, and two are held behind it
	var key string
	f.scan(t, `SELECT ordering_key FROM holdfast_outbox WHERE due_at IS NOT NULL AND NOT held`, &key)
	remove := func(want int) {
		t.Helper()
		n, err := f.store.Parked().Remove(t.Context(), outbox.Filter{}, outbox.Removal{By: "ada"})
		if err != nil || n != want {
			t.Fatalf("removed %d, error %v, want %d", n, err, want)
		}
	}
	unlock := f.lockRow(t, key, "1")
	remove(0)
	unlock()
	remove(1)
	drain(t, relay, 2)
	wantKey(t, publisher, key, "1", "2")
}

// A claim does not lock messages that are not due, because an operator's change would leave them out.
func TestRemove_besideClaim(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	_, relay := f.failingOnce(t, time.Hour)
	f.write(t, keyed(1, 2)...)
	drainAll(t, relay)
	inTx := func(sql string, then func()) {
		tx, err := f.pool.Begin(t.Context())
		must(t, err)
		_, err = tx.Exec(t.Context(), sql)
		then()
		must(t, errors.Join(err, tx.Rollback(t.Context())))
	}
	inTx(`SELECT FROM holdfast_outbox FOR UPDATE`, func() {}) // a claim tests only rows that were locked before
	inTx(`SELECT FROM holdfast_outbox_claim(1, 1000000, 16, '{}', 10, true, '{}')`, func() {
		n, err := f.store.Parked().Remove(t.Context(), outbox.Filter{}, outbox.Removal{By: "ada"})
		if err != nil || n != 1 {
			t.Errorf("removed %d, error %v", n, err)
		}
	})
}

// If the row of a message behind a waiting one of its key is locked, the other messages of the key are still held.
func TestReadyRowLockedBehindAWaitingOne(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	publisher, relay := f.failingOnce(t, time.Hour)
	f.write(t, keyed(1, 1)...)
	drainAll(t, relay)
	f.write(t, keyed(1, 4)[1:]...)
	unlock := f.lockRow(t, "key-0", "2")
	drain(t, relay, 0)
	unlock()
	f.exec(t, `UPDATE holdfast_outbox SET due_at = now() WHERE due_at IS NOT NULL AND NOT held`)
	_, err := relay.Drain(t.Context(), outbox.Bounds{Limit: 4, TimeLimit: testenv.Patience})
	must(t, err)
	wantKey(t, publisher, "key-0", "0", "1", "2", "3")
}

// If a session locks a message while it is published, only that message and the later ones of its key are published
// again, in order, when the session has ended.
func TestPublishedRowLockedElsewhere(t *testing.T) {
	t.Parallel()
	for name, retention := range map[string]time.Duration{"deleted": 0, "kept": time.Hour} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t, outboxpgx.Config{Retention: retention})
			f.store.Claims(driver.Lanes, 0)
			f.write(t, keyed(8, 4)...)
			batch, err := f.store.Claim(t.Context(), driver.Claim{Limit: 500, Lease: time.Minute})
			must(t, err)
			unlock := f.lockRow(t, "key-0", "1")
			var published []driver.Settlement
			for _, m := range batch.Messages {
				published = append(published, driver.Settlement{ID: m.ID, Verdict: driver.Published})
			}
			settled, err := f.store.Settle(t.Context(), batch, published)
			must(t, err)
			if len(batch.Messages) != 32 || len(settled.Stale) > 0 {
				t.Errorf("of %d messages: %+v", len(batch.Messages), settled)
			}
			publisher := outboxtest.NewPublisher()
			relay := f.relay(t, publisher, outbox.RelayConfig{})
			drain(t, relay, 0)
			unlock()
			drain(t, relay, 3)
			wantKey(t, publisher, "key-0", "1", "2", "3")
			f.untilEmpty(t, 0)
		})
	}
}

// If a session has locked a message before its claim, the message is published once, when the session has ended.
func TestReadyRowLockedElsewhere(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	publisher := outboxtest.NewPublisher()
	relay := f.relay(t, publisher, outbox.RelayConfig{})
	other := sharing("key-0")
	before := outbox.Message{Name: "other", Key: other, Body: []byte("0")}
	f.write(t, append([]outbox.Message{before}, keyed(1, 3)...)...)
	unlock := f.lockRow(t, "key-0", "0")
	drain(t, relay, 1)
	wantKey(t, publisher, other, "0")
	f.write(t, outbox.Message{Name: "else", Body: []byte("1"), Key: "key-1"})
	drain(t, relay, 1)
	unlock()
	drain(t, relay, 3)
	wantKey(t, publisher, "key-0", "0", "1", "2")
}

// A row that is too large to be read keeps back the later messages of its key while another session locks it. Its dead
// letter has the key.
func TestUnreadableRowLockedElsewhere(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	publisher := outboxtest.NewPublisher()
	relay := f.relay(t, publisher, outbox.RelayConfig{})
	other := sharing("key-0")
	before := outbox.Message{Name: "other", Key: other, Body: []byte("9")} // a lane that starts with a locked row is not claimed
	f.write(t, append([]outbox.Message{before}, keyed(1, 3)...)...)
	f.exec(t, `UPDATE holdfast_outbox SET name = repeat('a', 129) WHERE body = '0'`)
	unlock := f.lockRow(t, "key-0", "0")
	drain(t, relay, 1)
	wantKey(t, publisher, other, "9")
	unlock()
	drain(t, relay, 2)
	wantKey(t, publisher, "key-0", "1", "2")
	letters, err := f.dead.List(t.Context(), outbox.Filter{})
	must(t, err)
	if len(letters) != 1 || letters[0].Message.Key != "key-0" {
		t.Errorf("dead letters %+v", letters)
	}
}

// If a trigger or constraint of the user prevents deleting a message, the messages of its batch are marked as
// published, so that none is published again.
func TestPublishedRowThatCannotBeDeleted(t *testing.T) {
	t.Parallel()
	for name, sql := range map[string]string{
		"trigger": `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not this one'; END $$;
			CREATE TRIGGER refuse BEFORE DELETE ON holdfast_outbox FOR EACH ROW WHEN (OLD.ordering_key = 'key-0') EXECUTE FUNCTION refuse()`,
		"foreign key": `CREATE TABLE seen (id uuid REFERENCES holdfast_outbox); INSERT INTO seen SELECT id FROM holdfast_outbox WHERE ordering_key = 'key-0'`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t, outboxpgx.Config{})
			f.store.Claims(driver.Lanes, 0)
			publisher := outboxtest.NewPublisher()
			relay := f.relay(t, publisher, outbox.RelayConfig{})
			f.write(t, keyed(8, 2)...)
			f.exec(t, sql)
			drain(t, relay, 16)
			drain(t, relay, 0)
			f.untilEmpty(t, 0)
		})
	}
}

// If a trigger of the user refuses the release of a message, the other messages are still published.
func TestWaitingRowThatCannotBeReleased(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	_, relay := f.failingOnce(t, time.Millisecond)
	f.write(t, keyed(1, 1)...)
	f.exec(t, `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not this one'; END $$;
		CREATE TRIGGER refuse BEFORE UPDATE ON holdfast_outbox FOR EACH ROW WHEN (NEW.due_at IS NULL) EXECUTE FUNCTION refuse()`)
	_, _ = relay.Drain(t.Context(), outbox.Bounds{}) // may end before the message is due
	for range 3 {
		f.write(t, outbox.Message{Name: "other", Key: sharing("key-0"), Body: []byte("1")})
		report, err := relay.Drain(t.Context(), outbox.Bounds{})
		if report.Published != 1 || err == nil || !strings.Contains(err.Error(), "not this one") {
			t.Errorf("%+v, %v, want the other message published, and the reason for the failed release", report, err)
		}
	}
}
