package outboxpgx_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
)

// orderedPublisher fails according to respond, and checks that the numbers of a key increase.
type orderedPublisher struct {
	t       *testing.T
	respond func(driver.Message) error

	mu   sync.Mutex
	last map[string]int
	n    int
}

func newOrderedPublisher(t *testing.T) *orderedPublisher {
	t.Helper()
	return &orderedPublisher{t: t, last: map[string]int{}}
}

func (p *orderedPublisher) Publish(_ context.Context, m driver.Message, done func(error)) {
	if p.respond != nil {
		if err := p.respond(m); err != nil {
			done(err)
			return
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.n++
	if m.Key != "" {
		i, err := strconv.Atoi(string(m.Body))
		if last, ok := p.last[m.Key]; err != nil || ok && i <= last {
			p.t.Errorf("key %s: %d came after %d (%v)", m.Key, i, last, err)
		}
		p.last[m.Key] = i
	}
	done(nil)
}

func (p *orderedPublisher) confirmed() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.n
}

// deadlockFree is a Store that fails the test on a deadlock.
type deadlockFree struct {
	*outboxpgx.Store
	t *testing.T
}

func (s deadlockFree) note(err error) {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		s.t.Errorf("the database returned %s: %v", pg.Code, err)
	}
}

func (s deadlockFree) Claim(ctx context.Context, r driver.Claim) (driver.Batch, error) {
	b, err := s.Store.Claim(ctx, r)
	s.note(err)
	return b, err
}

func (s deadlockFree) Renew(ctx context.Context, l []driver.Lease, ttl time.Duration) ([]driver.Lease, error) {
	stale, err := s.Store.Renew(ctx, l, ttl)
	s.note(err)
	return stale, err
}

func (s deadlockFree) Settle(ctx context.Context, b driver.Batch, o []driver.Settlement) (driver.Settled, error) {
	settled, err := s.Store.Settle(ctx, b, o)
	s.note(err)
	return settled, err
}

// Random outcomes, times and relays: every key stays in order, nothing waits forever, and the locks of claims,
// settlements and releases never deadlock.
func TestWaitingMessagesKeepTheirOrder(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	publisher := newOrderedPublisher(t)
	publisher.respond = func(driver.Message) error {
		switch n := rand.IntN(1000); {
		case n < 60:
			return errors.New("some fault")
		case n < 70:
			return &driver.PublishError{Class: driver.Permanent}
		case n < 72:
			return &driver.PublishError{Class: driver.Unavailable}
		}
		return nil
	}
	var relays []*outbox.Relay
	for range 4 {
		store, err := outboxpgx.New(f.pool, outboxpgx.Config{Logger: quiet})
		must(t, err)
		store.Claims(1+rand.IntN(8), 0)
		relay, err := outbox.NewRelay(deadlockFree{store, t}, publisher, outbox.RelayConfig{
			BatchSize: 1 + rand.IntN(100), PollInterval: 20 * time.Millisecond, LeaseTTL: time.Minute, // which no stall outlasts
			Retry: outbox.RetryPolicy{MaxAttempts: 4, BaseDelay: 5 * time.Millisecond, MaxDelay: 50 * time.Millisecond}, Logger: quiet,
		})
		must(t, err)
		relays = append(relays, relay)
	}
	stop := run(t, relays...)
	defer stop()
	total := f.writeAtRandom(t, 20)
	f.untilEmpty(t, testenv.Patience)
	stop()
	dead, err := f.dead.Count(t.Context(), outbox.Filter{})
	must(t, err)
	if got := publisher.confirmed() + int(dead); got != total || dead == 0 {
		t.Errorf("%d published and %d dead, want %d together", publisher.confirmed(), dead, total)
	}
}

// writeAtRandom makes writers fill their own keys. Some messages are for later, and some transactions stay open for a
// while. It returns the number of messages.
func (f *fixture) writeAtRandom(t *testing.T, writers int) int {
	t.Helper()
	const perWriter = 150
	var writing sync.WaitGroup
	for w := range writers {
		writing.Go(func() {
			key := "key-" + strconv.Itoa(w)
			for i := 0; i < perWriter; {
				size := min(1+rand.IntN(10), perWriter-i)
				var msgs []outbox.Message
				for range size {
					m := outbox.Message{Name: "a.b", Key: key, Body: []byte(strconv.Itoa(i))}
					if rand.IntN(20) == 0 {
						m.NotBefore = time.Now().Add(time.Duration(rand.IntN(300)) * time.Millisecond) // timing: when a message is due
					}
					msgs = append(msgs, m)
					i++
				}
				if w%5 == 0 {
					msgs[0].Key = "" // outside the order of its key
				}
				err := f.manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
					if err := f.store.Write(ctx, tx, msgs...); err != nil || w%4 != 0 {
						return err
					}
					if _, err := tx.Exec(ctx, "SELECT 1"); err != nil { // the rows are written but not committed
						return err
					}
					time.Sleep(time.Duration(rand.IntN(20)) * time.Millisecond)
					return nil
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	writing.Wait()
	return writers * perWriter
}

// A key with very many messages behind a waiting one does not slow other keys, and continues in order.
func TestClaim_manyMessagesBehindWaitingOne(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	rows := 3_000
	if os.Getenv(testenv.NightlyVar) == "1" {
		rows = 300_000
	}
	f.exec(t, `
		INSERT INTO holdfast_outbox (id, lane, name, body, content_type, ordering_key, due_at)
		SELECT overlay(gen_random_uuid()::text PLACING '7' FROM 15)::uuid, $2, 'a', n::text::bytea, 'application/json', 'k', CASE WHEN n = 0 THEN now() + interval '1 day' END
		FROM generate_series(0, $1::int) n`, rows, driver.LaneOf(driver.Message{Key: "k"}))
	f.exec(t, `
		INSERT INTO holdfast_outbox (id, lane, name, body, content_type, due_at)
		SELECT gen_random_uuid(), n % 16, 'later', '1', 'application/json', now() + interval '1 day' FROM generate_series(1, $1::int / 3) n`, rows)
	publisher := newOrderedPublisher(t)
	relay := f.relay(t, publisher, outbox.RelayConfig{})
	testenv.Eventually(t, func() error { // the disk may stall with so many rows
		report, err := relay.Drain(t.Context(), outbox.Bounds{})
		if report.Published != 0 {
			t.Errorf("published %d waiting messages", report.Published)
		}
		return err
	})
	f.exec(t, `UPDATE holdfast_outbox SET due_at = now() WHERE ordering_key = 'k' AND body = '0'`)
	stop := run(t, f.relay(t, publisher, outbox.RelayConfig{PollInterval: 20 * time.Millisecond}))
	defer stop()
	want := publisher.confirmed() + min(rows, 50_000)
	testenv.Eventually(t, func() error {
		if got := publisher.confirmed(); got < want {
			return fmt.Errorf("%d of %d arrived", got, want)
		}
		return nil
	})
}

// With an old snapshot, the index keeps entries of deleted waiting rows. A claim does not walk over them for each
// message of the key.
func TestClaimsUnderAnOldSnapshot(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	gone := 10_000
	if os.Getenv(testenv.NightlyVar) == "1" {
		gone = 150_000
	}
	f.exec(t, `
		INSERT INTO holdfast_outbox (id, lane, name, body, content_type, ordering_key, due_at)
		SELECT gen_random_uuid(), $2, 'a', '0', 'application/json', 'key-0', now() + interval '1 day' FROM generate_series(1, $1::int) n`,
		gone, driver.LaneOf(driver.Message{Key: "key-0"}))
	old, err := f.pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	must(t, err)
	defer old.Rollback(context.WithoutCancel(t.Context()))
	_, err = old.Exec(t.Context(), `SELECT FROM holdfast_outbox_lanes`)
	must(t, err)
	f.exec(t, `DELETE FROM holdfast_outbox`)
	f.write(t, keyed(1, 500)...)
	defer run(t, f.relay(t, newOrderedPublisher(t), outbox.RelayConfig{}))()
	f.untilEmpty(t, testenv.Patience)
}

// After slow claims, claims return the same messages: none of a key whose first message waits.
func TestClaim_slowFormLeavesOutMessagesBehindWaiting(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	f.store.SlowClaims()
	f.write(t, keyed(3, 20)...)
	f.exec(t, `UPDATE holdfast_outbox SET due_at = now() + interval '1 day' WHERE (ordering_key, body) IN (('key-0', '0'), ('key-1', '7'))`)
	publisher := outboxtest.NewPublisher()
	drain(t, f.relay(t, publisher, outbox.RelayConfig{}), 27)
	for key, want := range map[string]int{"key-0": 0, "key-1": 7, "key-2": 20} {
		if got := len(of(publisher.Received(), key)); got != want {
			t.Errorf("%d of %s arrived, want %d", got, key, want)
		}
	}
}

// Held messages are released in portions, and Drain publishes all of them.
func TestDrainTakesAllPortions(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	publisher := newOrderedPublisher(t)
	failed := false
	publisher.respond = func(driver.Message) error {
		if !failed {
			failed = true
			return errors.New("once")
		}
		return nil
	}
	relay := f.relay(t, publisher, outbox.RelayConfig{Retry: outbox.RetryPolicy{BaseDelay: time.Second}})
	const n = 40
	f.write(t, keyed(1, n)...)
	report, err := relay.Drain(t.Context(), outbox.Bounds{})
	if err != nil || report.Failed != 1 || report.Published != 0 && report.Published != n {
		t.Fatalf("%+v, %v", report, err)
	}
	if report.Published == n { // the delay ended before the Drain did
		return
	}
	testenv.Eventually(t, func() error {
		report, err := relay.Drain(t.Context(), outbox.Bounds{})
		if err == nil && report.Published == 0 {
			return errors.New("nothing is due")
		}
		if err != nil || report.Published != n {
			t.Errorf("%+v, %v", report, err)
		}
		return nil
	})
}

// Ready messages are listed in stored order, also behind a parked message of their key. Parked messages are listed by
// due time.
func TestWaiting(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	publisher := outboxtest.NewPublisher()
	publisher.Respond(func(m driver.Message) error {
		return &driver.PublishError{Class: driver.Unroutable, Err: errors.New("no place for " + m.Name)}
	})
	f.write(t, outbox.Message{Name: "failed", Key: "k", Body: []byte("1"), Headers: map[string]string{"h": "1"}})
	retry := outbox.RetryPolicy{BaseDelay: time.Hour, MaxDelay: time.Hour}
	relay := f.relay(t, publisher, outbox.RelayConfig{Retry: retry})
	drainAll(t, relay)
	f.write(t, outbox.Message{Name: "later", Body: []byte("2"), NotBefore: time.Now().Add(24 * time.Hour)})
	f.write(t, outbox.Message{Name: "follows", Key: "k", Body: []byte("3")})
	drainAll(t, relay) // holds it behind the first message of its key
	f.write(t, outbox.Message{Name: "ready", Body: []byte("4")})
	f.exec(t, `INSERT INTO holdfast_outbox (id, lane, name, body, content_type, headers) VALUES (gen_random_uuid(), 1, 'foreign', '5', 'text/plain', '[1]')`)

	for _, tc := range []struct {
		filter outbox.WaitingFilter
		want   []string
	}{
		{outbox.WaitingFilter{}, []string{"follows", "ready", "foreign"}},
		{outbox.WaitingFilter{Limit: 2}, []string{"follows", "ready"}},
		{outbox.WaitingFilter{Key: "k"}, []string{"follows"}},
		{outbox.WaitingFilter{Name: "ready"}, []string{"ready"}},
	} {
		found, err := f.store.Waiting(t.Context(), tc.filter)
		must(t, err)
		var got []string
		for _, w := range found {
			got = append(got, w.Name)
		}
		if !slices.Equal(got, tc.want) {
			t.Errorf("%+v: %v, want %v", tc.filter, got, tc.want)
		}
	}
	parked, err := f.store.Parked().List(t.Context(), outbox.Filter{Whole: true})
	must(t, err)
	if len(parked) != 2 || parked[1].Message.Name != "later" {
		t.Fatalf("%+v", parked)
	}
	if w := parked[0]; w.Message.Key != "k" || string(w.Message.Body) != "1" || w.Message.Headers["h"] != "1" || w.Attempts != 1 || w.Class != string(driver.Unroutable) ||
		w.Error != "outbox: publish: unroutable: no place for failed" || time.Until(w.DueAt) < 30*time.Minute || w.CreatedAt.IsZero() || w.Unreadable != nil {
		t.Errorf("%+v", w)
	}
	ready, err := f.store.Waiting(t.Context(), outbox.WaitingFilter{})
	must(t, err)
	if ready[2].Unreadable == nil {
		t.Errorf("%+v", ready)
	}
	for _, bad := range []outbox.WaitingFilter{{Limit: -1}, {Name: fmt.Sprintf("%01001d", 0)}} {
		if _, err := f.store.Waiting(t.Context(), bad); err == nil {
			t.Errorf("%.60v was accepted", bad)
		}
	}
}

func TestStatsAreBounded(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "300,000 rows")
	f := setup(t, outboxpgx.Config{Retention: time.Hour})
	f.exec(t, `
		INSERT INTO holdfast_outbox (id, lane, name, body, content_type, created_at, published_at, due_at, attempts)
		SELECT gen_random_uuid(), n % 16, 'a', '1', 'application/json', now() - interval '1 minute',
		       CASE n % 3 WHEN 0 THEN now() END, CASE n % 3 WHEN 1 THEN now() + interval '1 hour' END, 1
		FROM generate_series(1, 303000) n`)
	stats, err := f.store.Depth(t.Context())
	must(t, err)
	if stats.Ready != driver.StatsLimit || stats.Parked != driver.StatsLimit || stats.Dead != 0 {
		t.Errorf("%+v", stats)
	}
	if stats.OldestAge < time.Minute || stats.OldestAge > 5*time.Minute {
		t.Errorf("the oldest is %v old", stats.OldestAge)
	}
}

// A dead letter replayed for a later hour does not count for the oldest age; a failed message does.
func TestOldestAgeOfWaitingMessages(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	f.exec(t, `
		INSERT INTO holdfast_outbox (id, lane, name, body, content_type, created_at, due_at, attempts)
		SELECT gen_random_uuid(), 0, 'a', '1', 'application/json', now() - n * interval '1 hour', now() + interval '1 day', 2 - n
		FROM generate_series(1, 2) n`)
	stats, err := f.store.Depth(t.Context())
	must(t, err)
	if stats.Parked != 2 || stats.OldestAge < time.Hour || stats.OldestAge > time.Hour+time.Minute {
		t.Errorf("%+v", stats)
	}
}

// With a Retention a published message can be looked at. Without one its row is gone.
func TestLook_published(t *testing.T) {
	t.Parallel()
	for retention, kept := range map[time.Duration]bool{time.Hour: true, 0: false} {
		f := setup(t, outboxpgx.Config{Retention: retention})
		m := outbox.Message{ID: ids.New(), Name: "sent", Body: []byte("1"), Headers: map[string]string{"h": "1"}}
		f.write(t, m)
		drainAll(t, f.relay(t, outboxtest.NewPublisher(), outbox.RelayConfig{}))
		found, err := f.store.Look(t.Context(), m.ID)
		switch {
		case !kept && !errors.Is(err, outbox.ErrNotFound):
			t.Errorf("found %+v, %v", found, err)
		case kept && (err != nil || found.Headers["h"] != "1" || found.PublishedAt.Before(found.CreatedAt)):
			t.Errorf("found %+v, %v", found, err)
		}
	}
}
