package expirypgx_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/expiry/expirytest"
	"github.com/holdfast-go/holdfast/internal/expiry/conformance"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

func TestConformance(t *testing.T) {
	t.Parallel()
	conformance.Test(t, func(t *testing.T) conformance.Backend { return newBackend(t) }, plain)
}

func TestConformanceBehindPgBouncer(t *testing.T) {
	t.Parallel()
	conformance.Test(t, func(t *testing.T) conformance.Backend { return backendOn(t, pgtest.NewPooled(t)) }, plain)
}

func TestConformanceSerializable(t *testing.T) {
	t.Parallel()
	conformance.Test(t, func(t *testing.T) conformance.Backend {
		b := newBackend(t)
		b.isolation = pgx.Serializable
		return b
	}, plain)
}

// Random rows, requests and failures have the same results on expirytest.Store and on Postgres, and leave the same
// rows. A sequence is identified by its number.
func TestDifferentialFakeAndPostgres(t *testing.T) {
	t.Parallel()
	tw := newTwins(t)
	for n := range testenv.Sequences(t, 40) {
		tw.begin(t, n)
		for range 15 {
			tw.step(t)
		}
		if t.Failed() {
			t.Fatalf("sequence %d:\n%s", n, strings.Join(tw.log, "\n"))
		}
	}
	if t.Logf("%d rows expired, %d batches failed", tw.expired, tw.failed); tw.expired == 0 || tw.failed == 0 {
		t.Error("too few to prove much")
	}
}

func (tw *twins) step(t *testing.T) {
	t.Helper()
	switch n := tw.random.IntN(20); {
	case n < 8:
		for range 1 + tw.random.IntN(4) {
			tw.put(t)
		}
	case n < 14:
		tw.sweepBatch(t)
	case n < 17:
		tw.look(t)
	case n < 19:
		tw.sweep(t)
	default:
		tw.check(t)
	}
	tw.compareRows(t)
}

func (tw *twins) sweepBatch(t *testing.T) {
	t.Helper()
	req := driver.Request{Limit: 1 + tw.random.IntN(7)}
	if tw.random.IntN(20) == 0 {
		req.Limit = 0
	}
	if tw.random.IntN(3) == 0 {
		req.Skip = tw.someIDs()
	}
	switch tw.random.IntN(4) {
	case 0:
		req.Only = tw.someIDs()
	case 1:
		req.After = driver.Cursor{Deadline: tw.deadline(), ID: tw.anID()}
	}
	tw.chooseFailure()
	locked := map[string]bool{}
	if tw.random.IntN(4) == 0 {
		for _, id := range tw.someIDs() {
			locked[id] = true
		}
	}
	tw.locked = locked
	unlock := tw.lock(t, locked)
	fake, fakeErr := tw.fake.SweepBatch(t.Context(), req)
	real, realErr := tw.real.SweepBatch(t.Context(), req)
	unlock()
	tw.locked = nil
	tw.note("batch of %d, after %s, skip %v, only %v, locked %v, %s of %s: %s", req.Limit, req.After.ID, req.Skip, req.Only, locked, tw.failure, tw.sqlState, tellBatch(fake, fakeErr))
	if a, b := tellBatch(fake, fakeErr), tellBatch(real, realErr); a != b {
		t.Errorf("the fake returned %s\nPostgres returned %s: %v", a, b, realErr)
	}
	if a, b := tw.given[0], tw.given[1]; !slices.Equal(a, b) {
		t.Errorf("the fake gave its callback %v, Postgres %v", a, b)
	}
	tw.expired += fake.Expired
	if fakeErr != nil {
		tw.failed++
	}
	sane(t, fake.Lag-real.Lag)
}

// sane checks the difference of two times from different clocks.
func sane(t *testing.T, d time.Duration) {
	t.Helper()
	if d.Abs() > 5*time.Minute { // deadlines are an hour apart
		t.Errorf("a time is %v off", d)
	}
}

func tellBatch(b driver.Batch, err error) string {
	if err == nil {
		return fmt.Sprintf("claimed %d, expired %d, last %s %s", b.Claimed, b.Expired, b.Last.ID, tellTime(b.Last.Deadline))
	}
	state := "no SQLSTATE"
	if server, ok := errors.AsType[*pgconn.PgError](err); ok {
		state = server.Code
	}
	if failed, ok := errors.AsType[*driver.BatchError](err); ok {
		return fmt.Sprintf("failed: rows %v, last %s %s, doubtful %v, %s", failed.Rows, failed.Last.ID, tellTime(failed.Last.Deadline), failed.Doubtful, state)
	}
	return "failed: no batch, " + state
}

func tellTime(at time.Time) string {
	if at.IsZero() {
		return "-"
	}
	return at.UTC().Format(time.RFC3339Nano)
}

func (tw *twins) look(t *testing.T) {
	t.Helper()
	skip := tw.someIDs()
	fake, fakeErr := tw.fake.Look(t.Context(), skip)
	real, realErr := tw.real.Look(t.Context(), skip)
	if fakeErr != nil || realErr != nil {
		t.Fatalf("look: %v, %v", fakeErr, realErr)
	}
	tw.note("look without %v: %+v", skip, fake)
	tw.overdue(t, 1+len(skip))
	if fake.Pending != real.Pending || fake.Overdue != real.Overdue || fake.Undated != real.Undated || (fake.Due <= 0) != (real.Due <= 0) {
		t.Errorf("look without %v: the fake returned %+v, Postgres %+v", skip, fake, real)
	}
	sane(t, fake.Due-real.Due)
	sane(t, fake.Lag-real.Lag)
	sane(t, fake.Now.Sub(real.Now)) // timing: compares the clocks of the stores, with much tolerance
}

// poisoned finds the quarantined rows in a log.
var poisoned = regexp.MustCompile(`row=\w+`)

// sweep runs a new sweeper on both twins.
func (tw *twins) sweep(t *testing.T) {
	t.Helper()
	tw.chooseFailure()
	tw.culprits = tw.someIDs()
	defer func() { tw.culprits = nil }()
	size := 1 + tw.random.IntN(6)
	var told [2]string
	for i, store := range []driver.Store{tw.fake, tw.real} {
		cfg := quiet()
		cfg.BatchSize, cfg.BatchTimeout, cfg.Rand = size, time.Minute, func() float64 { return 0.5 }
		log := &lines{}
		cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
		sw := newSweeper(t, store, cfg)
		r, err := sw.Sweep(t.Context())
		_, unfit := errors.AsType[finding](err)
		told[i] = fmt.Sprintf("%d batches, claimed %d, expired %d, raced %d, poisoned %d %v, failed %v, unfit %v",
			r.Batches, r.Claimed, r.Expired, r.Raced, r.Poisoned, poisoned.FindAllString(log.String(), -1), err != nil, unfit)
	}
	tw.note("sweep by %d, %s of %s for %v: %s", size, tw.failure, tw.sqlState, tw.culprits, told[0])
	if told[0] != told[1] {
		t.Errorf("the fake's sweep: %s\nthe sweep of Postgres: %s", told[0], told[1])
	}
}

func (tw *twins) check(t *testing.T) {
	t.Helper()
	fake, real := findings(t, tw.fake.Check(t.Context())), findings(t, checked(t, tw.real))
	if len(fake) != len(real) {
		t.Errorf("the fake finds %v, Postgres %v", fake, real)
	}
}

// overdue compares the overdue rows of both twins.
func (tw *twins) overdue(t *testing.T, limit int) {
	t.Helper()
	fake, fakeErr := tw.fake.Overdue(t.Context(), 0, limit)
	real, realErr := tw.real.Overdue(t.Context(), 0, limit)
	ids := func(rows []expiry.Row) (all []string) {
		for _, r := range rows {
			all = append(all, r.ID)
		}
		return all
	}
	if fakeErr != nil || realErr != nil || !slices.Equal(ids(fake), ids(real)) {
		t.Fatalf("overdue, at most %d: the fake has %v, %v; the store %v, %v", limit, ids(fake), fakeErr, ids(real), realErr)
	}
}

func (tw *twins) note(format string, args ...any) {
	tw.log = append(tw.log, fmt.Sprintf(format, args...))
}

func (tw *twins) anID() string { return fmt.Sprintf("r%02d", tw.random.IntN(12)) }

func (tw *twins) someIDs() (ids []string) {
	for range tw.random.IntN(4) {
		ids = append(ids, tw.anID())
	}
	return ids
}

// deadline returns one of a few deadlines, so that some are equal, and none is near now.
func (tw *twins) deadline() time.Time {
	return tw.now.Add(time.Duration(tw.random.IntN(12)-8)*time.Hour + 30*time.Minute)
}

func newRandom(n int) *rand.Rand { return rand.New(rand.NewPCG(4, uint64(n))) }

// twins are the same rows in memory and on Postgres, with the same callbacks.
type twins struct {
	b       *backend
	real    *expirypgx.Store
	fake    *expirytest.Store
	manager *txretrytest.Manager
	table   *expirytest.Store // the rows of the fake

	random   *rand.Rand
	now      time.Time
	announce map[string]int // announcements by the fake
	stubborn string         // a row whose change fails
	rowState string         // SQLSTATE of that failure
	locked   map[string]bool
	culprits []string    // the rows for which the callback fails; nil: all rows
	failure  string      // how the callback fails
	sqlState string      // SQLSTATE of the failing statement
	named    string      // the row named by the callback
	attempts [2]int      // calls of the callback, by twin
	given    [2][]string // rows to the callback
	log      []string

	expired, failed int
}

const twinSchema = `
CREATE TABLE twins (id text PRIMARY KEY, expires_at timestamptz, status text NOT NULL);
CREATE INDEX ON twins (expires_at, id) WHERE status = 'held';
CREATE TABLE told (id text NOT NULL);
CREATE TABLE stubborn (id text PRIMARY KEY, code text NOT NULL);
CREATE TABLE parent (id text PRIMARY KEY);
CREATE TABLE child (id text REFERENCES parent DEFERRABLE INITIALLY DEFERRED);
CREATE FUNCTION stumble() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE c text;
BEGIN
	SELECT code INTO c FROM stubborn WHERE id = new.id;
	IF FOUND AND new.status = 'expired' THEN RAISE 'stubborn' USING ERRCODE = c; END IF;
	RETURN new;
END $$;
CREATE TRIGGER stumble BEFORE UPDATE ON twins FOR EACH ROW WHEN (old.status = 'held') EXECUTE FUNCTION stumble()`

func newTwins(t *testing.T) *twins {
	t.Helper()
	tw := &twins{b: newBackend(t)}
	tw.b.exec(t, twinSchema)
	retry := txretry.Config{BaseDelay: time.Millisecond, MaxAttempts: 2}
	tw.manager = txretrytest.New(txretrytest.Config{Retry: retry})
	manager, err := txretry.New(tw.b.pool, retry)
	must(t, err)
	if tw.real, err = expirypgx.New(patient{manager}, "twins", expirypgx.Config{Emit: tw.emit(1, realSide{})}); err != nil {
		t.Fatal(err)
	}
	if tw.table, err = expirytest.New(tw.manager, expirytest.Config{}); err != nil {
		t.Fatal(err)
	}
	tw.fake, err = expirytest.New(tw.manager, expirytest.Config{Active: tw.active, Expire: tw.expire, Emit: tw.emit(0, fakeSide{tw})})
	must(t, err)
	return tw
}

// begin empties both twins for a sequence.
func (tw *twins) begin(t *testing.T, n int) {
	t.Helper()
	tw.b.exec(t, "DELETE FROM twins; DELETE FROM told; DELETE FROM stubborn")
	for id := range tw.fakeRows() {
		tw.putFake(t, id, time.Time{}, gone)
	}
	tw.random, tw.now, tw.announce, tw.log = newRandom(n), time.Now().Truncate(time.Microsecond), map[string]int{}, nil
	tw.stubborn, tw.sqlState = "", "P0001"
	if tw.random.IntN(2) == 0 {
		tw.stubborn = tw.anID()
		tw.sqlState = []string{"P0001", "23514", "42P01", "53100", "40001", "57014"}[tw.random.IntN(6)]
		tw.b.exec(t, "INSERT INTO stubborn VALUES ($1, $2)", tw.stubborn, tw.sqlState)
		tw.note("row %s fails with %s", tw.stubborn, tw.sqlState)
	}
	tw.rowState = tw.sqlState
}

// gone is the state of a fake row that Postgres does not have.
const gone = "gone"

func (tw *twins) fakeRows() map[string]string {
	rows := map[string]string{}
	for _, id := range allIDs() {
		if deadline, state, ok := tw.table.Get(id); ok && state != gone {
			rows[id] = fmt.Sprintf("%s until %s, told %d", state, tellTime(deadline), tw.announce[id])
		}
	}
	return rows
}

// compareRows compares the rows of the twins after the calls.
func (tw *twins) compareRows(t *testing.T) {
	t.Helper()
	rows, err := tw.b.pool.Query(t.Context(), "SELECT id, status, expires_at, (SELECT count(*) FROM told WHERE told.id = twins.id) FROM twins")
	must(t, err)
	real := map[string]string{}
	var id, state string
	var deadline *time.Time
	var told int
	_, err = pgx.ForEachRow(rows, []any{&id, &state, &deadline, &told}, func() error {
		if deadline == nil {
			deadline = &time.Time{}
		}
		real[id] = fmt.Sprintf("%s until %s, told %d", state, tellTime(*deadline), told)
		deadline = nil
		return nil
	})
	must(t, err)
	if fake := tw.fakeRows(); !maps.Equal(fake, real) {
		t.Errorf("the fake's rows: %v\nthe rows of Postgres: %v", fake, real)
	}
}

// put writes a row; one row in ten has no deadline.
func (tw *twins) put(t *testing.T) {
	t.Helper()
	id, deadline, state := tw.anID(), tw.deadline(), []string{"held", "held", "held", "confirmed"}[tw.random.IntN(4)]
	stored := &deadline
	if tw.random.IntN(10) == 0 {
		deadline, stored = time.Time{}, nil
	}
	tw.note("put %s %s %s", id, state, tellTime(deadline))
	tw.putFake(t, id, deadline, state)
	tw.b.exec(t, `INSERT INTO twins (id, status, expires_at) VALUES ($1, $2, $3)
		ON CONFLICT (id) DO UPDATE SET status = excluded.status, expires_at = excluded.expires_at`, id, state, stored)
}

func (tw *twins) putFake(t *testing.T, id string, deadline time.Time, state string) {
	t.Helper()
	err := tw.manager.Do(t.Context(), func(_ context.Context, tx pgx.Tx) error { return tw.table.Put(tx, id, deadline, state) })
	must(t, err)
}

func allIDs() (ids []string) {
	for n := range 12 {
		ids = append(ids, fmt.Sprintf("r%02d", n))
	}
	return ids
}

// active omits locked rows, because the fake runs one transaction at a time.
func (tw *twins) active() (rows []expiry.Row) {
	for _, id := range allIDs() {
		if deadline, state, _ := tw.table.Get(id); state == "held" && !tw.locked[id] {
			rows = append(rows, expiry.Row{ID: id, Deadline: deadline})
		}
	}
	return rows
}

func (tw *twins) expire(_ context.Context, tx pgx.Tx, row expiry.Row) error {
	if row.ID == tw.stubborn {
		return txretrytest.Fail(tx, &pgconn.PgError{Code: tw.rowState})
	}
	return tw.table.Put(tx, row.ID, row.Deadline, "expired")
}

// lock makes another transaction hold rows until unlock is called.
func (tw *twins) lock(t *testing.T, ids map[string]bool) (unlock func()) {
	t.Helper()
	if len(ids) == 0 {
		return func() {}
	}
	tx, err := tw.b.pool.Begin(t.Context())
	must(t, err)
	if _, err := tx.Exec(t.Context(), "SELECT FROM twins WHERE id = ANY($1) FOR UPDATE", slices.Collect(maps.Keys(ids))); err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := tx.Rollback(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	}
}

// chooseFailure chooses the callback's next failure.
func (tw *twins) chooseFailure() {
	tw.failure = []string{"none", "none", "none", "own", "names a row", "statement", "swallowed", "goes on", "names and statement", "panic", "at first", "at commit"}[tw.random.IntN(12)]
	tw.sqlState = []string{"P0001", "23505", "22012", "42703", "42P01", "53100", "53200", "57014", "57P01", "25P02", "08006", "55P03", "40001", "40P01", "54000"}[tw.random.IntN(15)]
	tw.named = tw.anID()
	tw.attempts, tw.given = [2]int{}, [2][]string{}
}

// side has the statements, which differ between the twins.
type side interface {
	tell(ctx context.Context, tx pgx.Tx, id string) error
	fail(ctx context.Context, tx pgx.Tx, sqlState string) error
	failAtCommit(ctx context.Context, tx pgx.Tx) error
}

// emit returns the callback of either twin.
func (tw *twins) emit(twin int, s side) func(context.Context, pgx.Tx, []expiry.Row) error {
	return func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error {
		tw.attempts[twin]++
		guilty := tw.culprits == nil
		for _, row := range rows {
			tw.given[twin] = append(tw.given[twin], row.ID+" "+tellTime(row.Deadline))
			guilty = guilty || slices.Contains(tw.culprits, row.ID)
			if err := s.tell(ctx, tx, row.ID); err != nil {
				return err
			}
		}
		if !guilty {
			return nil
		}
		return tw.misbehave(ctx, tx, tw.attempts[twin], s)
	}
}

func (tw *twins) misbehave(ctx context.Context, tx pgx.Tx, attempt int, s side) error {
	switch tw.failure {
	case "own":
		return errors.New("no")
	case "names a row":
		return fmt.Errorf("wrapped: %w", &expiry.RowError{ID: tw.named, Err: errors.New("no")})
	case "statement":
		return s.fail(ctx, tx, tw.sqlState)
	case "swallowed":
		_ = s.fail(ctx, tx, tw.sqlState)
	case "goes on":
		_ = s.fail(ctx, tx, tw.sqlState)
		return s.tell(ctx, tx, "more")
	case "names and statement":
		return &expiry.RowError{ID: tw.named, Err: s.fail(ctx, tx, tw.sqlState)}
	case "panic":
		panic("boom")
	case "at first":
		if attempt%2 == 1 {
			return s.fail(ctx, tx, "40001")
		}
	case "at commit":
		return s.failAtCommit(ctx, tx)
	}
	return nil
}

type realSide struct{}

func (realSide) tell(ctx context.Context, tx pgx.Tx, id string) error {
	_, err := tx.Exec(ctx, "INSERT INTO told VALUES ($1)", id)
	return err
}

func (realSide) fail(ctx context.Context, tx pgx.Tx, sqlState string) error {
	return (&backend{}).Fail(ctx, tx, sqlState)
}

func (realSide) failAtCommit(ctx context.Context, tx pgx.Tx) error {
	_, err := tx.Exec(ctx, "INSERT INTO child VALUES ('nobody')")
	return err
}

type fakeSide struct{ tw *twins }

func (s fakeSide) tell(_ context.Context, tx pgx.Tx, id string) error {
	return txretrytest.Effect(tx, func() { s.tw.announce[id]++ }, func() { s.tw.announce[id]-- })
}

func (fakeSide) fail(_ context.Context, tx pgx.Tx, sqlState string) error {
	return txretrytest.Fail(tx, &pgconn.PgError{Code: sqlState})
}

func (fakeSide) failAtCommit(_ context.Context, tx pgx.Tx) error {
	return txretrytest.EffectAtCommit(tx, func() error { return &pgconn.PgError{Code: "23503"} }, nil, nil)
}
