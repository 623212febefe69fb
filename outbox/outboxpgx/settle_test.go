package outboxpgx_test

import (
	"context"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

// A message that commits while a settlement does is found: the relay that was woken for it has found the lane leased, so
// the one that settles is told.
func TestLookComesAfterTheRelease(t *testing.T) {
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
		t.Errorf("%+v, want to be told of more", r.settled)
	}
}

// holdUpCommits has every transaction that deletes messages wait at its COMMIT, until goOn is called.
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

// A claim that leaves a doubtful lane behind, since a sound one has waited longer, says so: else the messages of a relay
// that was killed wait for the next poll.
func TestDoubtfulLaneThatIsLeft(t *testing.T) {
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
		t.Errorf("claimed %d messages, suspect: %v, want the sound one and to be told of the other lane", len(batch.Messages), batch.Suspect)
	}
}

// A settlement that is committed counts as one although the look after it fails.
func TestLookThatFailsAfterTheCommit(t *testing.T) {
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
		t.Errorf("%+v, want another look and no stale lease", settled)
	}
	depth, err := f.store.Depth(t.Context())
	must(t, err)
	if depth.Ready != 0 {
		t.Errorf("%d messages are left", depth.Ready)
	}
}

// A claim that is cancelled itself is not sent again: only a look below the floors is left out.
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
