package outboxpgx_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
	"github.com/holdfast-go/holdfast/outbox/outboxtest/conformance"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrysql"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

type write = func(...outbox.Message) error

func TestConformance(t *testing.T) {
	t.Parallel()
	pgtest.New(t) // skips before there are subtests
	for name, inTx := range map[string]func(*fixture, context.Context, func(write) error) error{
		"txretry":      inManaged,
		"raw pgx":      inRaw,
		"database sql": inSQL,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conformance.TestWriter(t, conformance.Backend{Open: func(t *testing.T) conformance.Store {
				f := setup(t, outboxpgx.Config{})
				return f.backend(func(ctx context.Context, fn func(write) error) error { return inTx(f, ctx, fn) })
			}})
		})
	}
	for name, cfg := range map[string]outboxpgx.Config{
		"deleting":  {},
		"retention": {Retention: 1 << 40, Table: "my_events"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			backend := conformance.Backend{Open: func(t *testing.T) conformance.Store {
				f := setup(t, cfg)
				return f.backend(func(ctx context.Context, fn func(write) error) error { return inManaged(f, ctx, fn) })
			}}
			conformance.TestSource(t, backend)
			if name == "deleting" || os.Getenv(testenv.NightlyVar) == "1" {
				conformance.TestDeadLetters(t, backend)
				conformance.TestParked(t, backend)
			}
		})
	}
}

func TestConformanceBehindPgBouncer(t *testing.T) {
	t.Parallel()
	backend := conformance.Backend{Open: func(t *testing.T) conformance.Store {
		f := setupOn(t, pgtest.NewPooled(t), outboxpgx.Config{PollOnly: true})
		return f.backend(func(ctx context.Context, fn func(write) error) error { return inManaged(f, ctx, fn) })
	}}
	t.Run("writer", func(t *testing.T) { t.Parallel(); conformance.TestWriter(t, backend) })
	if os.Getenv(testenv.NightlyVar) != "1" {
		return // a pooler changes nothing else
	}
	t.Run("source", func(t *testing.T) { t.Parallel(); conformance.TestSource(t, backend) })
	t.Run("dead letters", func(t *testing.T) { t.Parallel(); conformance.TestDeadLetters(t, backend) })
	t.Run("parked", func(t *testing.T) { t.Parallel(); conformance.TestParked(t, backend) })
}

func TestManagedWriter(t *testing.T) {
	t.Parallel()
	pgtest.New(t) // skips before there are subtests
	conformance.TestManagedWriter(t, conformance.ManagedBackend{Open: func(t *testing.T) conformance.Managed {
		f := setup(t, outboxpgx.Config{})
		return conformance.Managed{
			Store:   f.backend(func(ctx context.Context, fn func(write) error) error { return inManaged(f, ctx, fn) }),
			Manager: f.manager, Write: f.store.Write, WriteOnce: f.store.WriteOnce,
			Break: func(ctx context.Context, tx pgx.Tx) error {
				_, err := tx.Exec(ctx, "SELECT 1/0")
				return err
			},
		}
	}})
}

func inManaged(f *fixture, ctx context.Context, fn func(write) error) error {
	return f.manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
		return fn(func(msgs ...outbox.Message) error { return f.store.Write(ctx, tx, msgs...) })
	})
}

func inRaw(f *fixture, ctx context.Context, fn func(write) error) error {
	return pgx.BeginFunc(ctx, f.pool, func(tx pgx.Tx) error {
		return fn(func(msgs ...outbox.Message) error { return f.store.Write(ctx, tx, msgs...) })
	})
}

func inSQL(f *fixture, ctx context.Context, fn func(write) error) error {
	db := stdlib.OpenDBFromPool(f.pool)
	defer db.Close()
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := fn(func(msgs ...outbox.Message) error { return f.store.Write(ctx, txretrysql.Wrap(tx), msgs...) }); err != nil {
		return err
	}
	return tx.Commit()
}

// Old poolers need the modes without prepared statements. In these modes the types of arguments follow from their Go
// types alone.
func TestEveryExecMode(t *testing.T) {
	t.Parallel()
	pgtest.InEveryMode(t, func(t *testing.T, inMode func(*pgxpool.Pool) *pgxpool.Pool) {
		f := setupOn(t, inMode(pgtest.New(t)), outboxpgx.Config{})
		f.store.Claims(driver.Lanes, 0)

		m := outbox.Message{Name: "a", Body: []byte("{}")}
		f.write(t, m)
		f.write(t, m, m)
		batch, err := f.store.Claim(t.Context(), driver.Claim{Limit: 10, Lease: time.Minute})
		must(t, err)
		if len(batch.Messages) != 3 {
			t.Fatalf("claimed %d messages, want 3", len(batch.Messages))
		}
		_, err = f.store.Settle(t.Context(), batch, []driver.Settlement{
			{ID: batch.Messages[0].ID, Verdict: driver.Published},
			{ID: batch.Messages[1].ID, Verdict: driver.Failed, Delay: time.Hour, Class: driver.Retryable, Err: "failed"},
			{ID: batch.Messages[2].ID, Verdict: driver.Dead, Class: driver.Permanent, Err: "dead"},
		})
		must(t, err)
		stats, err := f.store.Depth(t.Context())
		must(t, err)
		if stats.Ready != 0 || stats.Parked != 1 || stats.Dead != 1 {
			t.Errorf("after Settle: %+v", stats)
		}
		letter, err := f.dead.Show(t.Context(), batch.Messages[2].ID)
		must(t, err)
		if n, err := f.dead.Replay(t.Context(), outbox.Filter{IDs: []uuid.UUID{letter.Message.ID}}, outbox.Replay{By: "me"}); n.Returned != 1 || err != nil {
			t.Errorf("retried %d, %v", n, err)
		}
		if n, err := f.store.Parked().Replay(t.Context(), outbox.Filter{Class: "retryable"}, outbox.Replay{By: "me", Delay: time.Hour}); n.Returned != 1 || err != nil {
			t.Errorf("postponed %d, %v", n, err)
		}
		if n, err := f.store.Parked().Remove(t.Context(), outbox.Filter{ErrorContains: "fail"}, outbox.Removal{By: "me"}); n != 1 || err != nil {
			t.Errorf("removed %d, %v", n, err)
		}
	})
}

// Random calls of writers, relays and operators have the same results on Postgres and on the fake, step by step,
// except for error texts. A sequence is determined by its seed. Half of the seeds are the same in every run.
func TestDifferentialOutbox(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	f.store.Claims(driver.Lanes, 0)
	sequences := testenv.Sequences(t, 60)
	first := rand.Uint64()
	t.Logf("the random half begins with the seed %d", first)
	claimed := 0
	for n := range sequences {
		seed := uint64(n)
		if n >= sequences/2 {
			seed = first + uint64(n-sequences/2)
		}
		on, off := newScript(f.side(t), seed), newScript(fakeSide(), seed)
		on.run(t.Context())
		off.run(t.Context())
		if !slices.Equal(on.trace, off.trace) {
			t.Fatalf("seed %d, on Postgres:\n%s\n\non the fake:\n%s", seed, strings.Join(on.trace, "\n"), strings.Join(off.trace, "\n"))
		}
		claimed += on.claimed
	}
	t.Logf("%d sequences, %d messages claimed", sequences, claimed)
	if claimed < sequences {
		t.Error("too few messages claimed to prove anything")
	}
}

// side is one side of the comparison: Postgres or the fake.
type side struct {
	manager txretry.Transactor
	writer  interface {
		Write(ctx context.Context, tx pgx.Tx, msgs ...outbox.Message) error
		WriteOnce(ctx context.Context, tx pgx.Tx, key string, m outbox.Message) (id uuid.UUID, first bool, err error)
	}
	source interface {
		driver.Source
		driver.Measured
		Waiting(ctx context.Context, f outbox.WaitingFilter) ([]outbox.Waiting, error)
	}
	fail         func(ctx context.Context, tx pgx.Tx) error
	dead, parked outbox.DeadLetters
}

// side returns the Postgres side with empty tables.
func (f *fixture) side(t *testing.T) side {
	t.Helper()
	f.exec(t, `
		DELETE FROM holdfast_outbox; DELETE FROM holdfast_outbox_dead; DELETE FROM holdfast_outbox_dedup;
		UPDATE holdfast_outbox_lanes SET token = NULL, lease_until = '-infinity', batch = 0, suspect = NULL, alone = NULL, losses = 0`)
	return side{
		manager: f.manager, writer: f.store, source: f.store,
		fail: func(ctx context.Context, tx pgx.Tx) error { return second(tx.Exec(ctx, "SELECT 1/0")) },
		dead: f.dead, parked: f.store.Parked(),
	}
}

func fakeSide() side {
	store := outboxtest.New()
	return side{
		manager: txretrytest.New(txretrytest.Config{}), writer: store, source: store,
		fail: func(_ context.Context, tx pgx.Tx) error {
			return txretrytest.Fail(tx, &pgconn.PgError{Severity: "ERROR", Code: "22012"})
		},
		dead: store.DeadLetters(), parked: store.Parked(),
	}
}

// script makes random calls and records their results. The choice of calls does not depend on the results, nor on how
// a store distributes its lanes.
type script struct {
	side
	rng     *rand.Rand
	trace   []string
	written []outbox.Message
	held    []driver.Batch // not settled
	old     []driver.Batch // settled
	claimed int
}

func newScript(s side, seed uint64) *script {
	return &script{side: s, rng: rand.New(rand.NewPCG(seed, 1))}
}

func (s *script) note(format string, args ...any) {
	s.trace = append(s.trace, fmt.Sprintf(format, args...))
}

func (s *script) run(ctx context.Context) {
	steps := []func(context.Context){s.transact, s.transact, s.transact, s.claim, s.claim, s.settle, s.settle, s.settleAgain, s.renew, s.replayDead, s.moveParked, s.measure}
	for range 20 {
		steps[s.rng.IntN(len(steps))](ctx)
	}
	s.settle(ctx)
	s.claim(ctx)
	s.measure(ctx)
}

func (s *script) transact(ctx context.Context) {
	readOnly := s.rng.IntN(10) == 0
	err := s.manager.DoWith(ctx, txretry.Options{ReadOnly: readOnly}, func(ctx context.Context, tx pgx.Tx) error {
		return s.inside(ctx, tx, 0)
	})
	s.note("transaction, read only %v: %s", readOnly, kind(err))
}

// inside makes some calls in a transaction or a savepoint.
func (s *script) inside(ctx context.Context, tx pgx.Tx, depth int) error {
	for range 1 + s.rng.IntN(3) {
		switch n := s.rng.IntN(12); {
		case n < 6:
			var msgs []outbox.Message
			for range s.rng.IntN(5) {
				msgs = append(msgs, s.message())
			}
			s.note("write %d: %s", len(msgs), kind(s.writer.Write(ctx, tx, msgs...)))
		case n < 8:
			key := fmt.Sprintf("once %d", s.rng.IntN(3))
			id, first, err := s.writer.WriteOnce(ctx, tx, key, s.message())
			s.note("write %q: %s first %v: %s", key, id, first, kind(err))
		case n < 9:
			s.note("a statement fails: %s", kind(s.fail(ctx, tx)))
		case depth < 2:
			err := pgx.BeginFunc(ctx, tx, func(sp pgx.Tx) error { return s.inside(ctx, sp, depth+1) })
			s.note("savepoint: %s", kind(err))
		}
	}
	if s.rng.IntN(5) == 0 {
		return errOnPurpose
	}
	return nil
}

// message returns a random message; some are invalid, or have the id of an earlier message.
func (s *script) message() outbox.Message {
	var id uuid.UUID
	for i := range id {
		id[i] = byte(s.rng.Uint32())
	}
	id[6], id[8] = id[6]&0x0f|0x70, id[8]&0x3f|0x80
	m := outbox.Message{ID: id, Name: "order.placed", Body: fmt.Appendf(nil, `{"n": %d}`, len(s.written))}
	if s.rng.IntN(3) > 0 {
		m.Key = fmt.Sprintf("key %d", s.rng.IntN(4))
	}
	if s.rng.IntN(4) == 0 {
		m.Headers = map[string]string{"tenant": "7"}
		m.Route = outbox.Route{Exchange: "ex", RoutingKey: "a.b", Headers: map[string]string{"h": "v"}}
	}
	switch n := s.rng.IntN(20); {
	case n == 0:
		m.Name = "Order Placed"
	case n == 1 && len(s.written) > 0:
		m.ID = s.written[s.rng.IntN(len(s.written))].ID
	case n == 2:
		m.NotBefore = time.Now().Add(time.Hour)
	}
	s.written = append(s.written, m)
	return m
}

// claim claims all ready messages, in any number of batches. It first makes a claim that skips every transport,
// because a store may return due messages only behind ready ones, and in lanes that are leased by then.
func (s *script) claim(ctx context.Context) {
	s.settle(ctx) // a store may lease further lanes besides those of the messages
	none, err := s.source.Claim(ctx, driver.Claim{Limit: 1, Lease: time.Hour, Skip: []string{""}})
	s.note("claimed %d of no transport: %s", len(none.Messages), kind(err))
	var all []driver.Message
	for looks := 0; looks < 20; {
		b, err := s.source.Claim(ctx, driver.Claim{Limit: 1000, Lease: time.Hour, Alone: len(s.held) == 0})
		if err != nil {
			s.note("claim: %s", kind(err))
			return
		}
		if len(b.Leases) > 0 {
			s.held = append(s.held, b)
			all = append(all, b.Messages...)
			continue
		}
		if looks++; !b.More {
			break
		}
	}
	s.claimed += len(all)
	slices.SortStableFunc(all, func(a, b driver.Message) int {
		if a.Key == "" && b.Key == "" {
			return slices.Compare(a.ID[:], b.ID[:])
		}
		return slices.Compare([]byte(a.Key), []byte(b.Key))
	})
	s.note("claimed %d", len(all))
	for _, m := range all {
		s.note("  %s", show(m))
	}
}

func show(m driver.Message) string {
	m.CreatedAt = time.Time{}
	return fmt.Sprintf("%+v", m)
}

// settle chooses each message's outcome by its id.
func (s *script) settle(ctx context.Context) {
	salt, stale := byte(s.rng.Uint32()), 0
	for _, b := range s.held {
		var outcomes []driver.Settlement
		for _, m := range b.Messages {
			o := driver.Settlement{ID: m.ID, Class: driver.Retryable, Err: "on purpose"}
			switch n := (m.ID[15] ^ salt) % 8; {
			case n < 3:
				o.Verdict = driver.Published
			case n < 4:
				o.Verdict, o.Delay = driver.Failed, time.Hour
			case n < 5:
				o.Verdict = driver.Failed
			case n < 7:
				o.Verdict, o.Class = driver.Dead, driver.Permanent
			default:
				continue
			}
			outcomes = append(outcomes, o)
		}
		settled, err := s.source.Settle(ctx, b, outcomes)
		if stale += len(settled.Stale); err != nil {
			s.note("settle: %s", kind(err))
		}
	}
	s.note("settled, %d stale", stale)
	s.old, s.held = s.held, nil
}

func (s *script) settleAgain(ctx context.Context) {
	held, stale := 0, 0
	for _, b := range s.old {
		settled, err := s.source.Settle(ctx, b, nil)
		if stale, held = stale+len(settled.Stale), held+len(b.Leases); err != nil {
			s.note("settle again: %s", kind(err))
		}
	}
	s.note("settled again, all stale %v", stale == held)
}

func (s *script) renew(ctx context.Context) {
	for _, b := range slices.Concat(s.held, s.old) {
		lost, err := s.source.Renew(ctx, b.Leases, time.Hour)
		if whole := len(lost) == 0 || len(lost) == len(b.Leases); err != nil || !whole {
			s.note("renew: %d of %d stale: %s", len(lost), len(b.Leases), kind(err))
		}
	}
	s.note("renewed")
}

// replayDead lists the dead letters. It replays or removes one, all, or an unknown one, or makes a dry run.
func (s *script) replayDead(ctx context.Context) {
	pick := s.rng.Uint32()
	letters, err := s.dead.List(ctx, outbox.Filter{Whole: true})
	slices.SortFunc(letters, func(a, b outbox.DeadLetter) int { return slices.Compare(a.Message.ID[:], b.Message.ID[:]) })
	s.note("%d dead letters: %s", len(letters), kind(err))
	for _, l := range letters {
		l.CreatedAt, l.FailedAt, l.Fingerprint, l.Cursor = time.Time{}, time.Time{}, "", ""
		s.note("  %+v", l)
	}
	groups, err := s.dead.Groups(ctx, outbox.Filter{})
	s.note("in groups: %s", kind(err))
	var kinds []string
	for _, g := range groups {
		kinds = append(kinds, fmt.Sprintf("  %d of %s, as %q for %s", g.Count, g.Sample.Class, g.Sample.Error, g.Sample.Message.Name))
	}
	slices.Sort(kinds)
	s.note("%s", strings.Join(kinds, "\n"))
	id := uuid.UUID{1}
	if len(letters) > 0 {
		id = letters[int(pick)%len(letters)].Message.ID
	}
	one := outbox.Filter{IDs: []uuid.UUID{id}}
	n, err := s.dead.Count(ctx, one)
	s.note("%d of them: %s", n, kind(err))
	switch pick % 7 {
	case 0:
		s.removeDead(ctx, one)
		return
	case 1:
		s.removeDead(ctx, outbox.Filter{Class: string(driver.Permanent)})
		return
	case 2, 3:
		one = outbox.Filter{}
	}
	how := outbox.Replay{By: "me", DryRun: pick%3 == 0, Progress: func(r outbox.Replayed) { s.note("  %+v so far", r) }}
	if pick%5 < 2 {
		how.Edit = func(m outbox.Message) ([]byte, error) {
			if pick%5 == 0 {
				return nil, errOnPurpose
			}
			return append([]byte("edited "), m.Body...), nil
		}
	}
	replayed, err := s.dead.Replay(ctx, one, how)
	s.note("%+v: %s", replayed, kind(err))
}

func (s *script) removeDead(ctx context.Context, f outbox.Filter) {
	n, err := s.dead.Remove(ctx, f, outbox.Removal{By: "me", Progress: func(removed int) { s.note("  %d so far", removed) }})
	s.note("%d removed: %s", n, kind(err))
}

func (s *script) measure(ctx context.Context) {
	stats, err := s.source.Depth(ctx)
	s.note("%d ready, %d parked, %d dead, aged %v: %s", stats.Ready, stats.Parked, stats.Dead, stats.OldestAge > 0, kind(err))
	for _, f := range []outbox.WaitingFilter{{}, {Limit: 2}, {Name: "a"}, {Limit: -1}} {
		found, err := s.source.Waiting(ctx, f)
		s.note("%d waiting for %+v: %s", len(found), f, kind(err))
		for _, w := range found {
			s.note("  %s %s %q, %d attempts, %s %q", w.ID, w.Name, w.Body, w.Attempts, w.Class, w.Error)
		}
	}
}

// moveParked lists the parked messages. It retries, postpones or removes one or all of them.
func (s *script) moveParked(ctx context.Context) {
	pick := s.rng.Uint32()
	found, err := s.parked.List(ctx, outbox.Filter{})
	slices.SortFunc(found, func(a, b outbox.DeadLetter) int { return slices.Compare(a.Message.ID[:], b.Message.ID[:]) })
	s.note("%d parked: %s", len(found), kind(err))
	for _, l := range found {
		l.CreatedAt, l.DueAt, l.Fingerprint, l.Cursor = time.Time{}, time.Time{}, "", ""
		s.note("  %+v", l)
	}
	chosen := outbox.Filter{}
	if len(found) > 0 && pick%3 > 0 {
		chosen.IDs = []uuid.UUID{found[int(pick)%len(found)].Message.ID}
	}
	if pick%5 == 0 {
		n, err := s.parked.Remove(ctx, chosen, outbox.Removal{By: "me"})
		s.note("%d parked ones removed: %s", n, kind(err))
		s.claim(ctx) // until then, a store may count the next message of a key as parked and due
		return
	}
	moved, err := s.parked.Replay(ctx, chosen, outbox.Replay{By: "me", Delay: time.Duration(pick%2) * time.Hour})
	s.note("%+v parked ones moved: %s", moved, kind(err))
}
