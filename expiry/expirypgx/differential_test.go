package expirypgx_test

import (
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// Random rows, requests and failures get the same answers of expirytest.Store and of
// Postgres, and leave the same rows behind. A sequence is told by its number.
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
		t.Error("that proves little")
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
		t.Errorf("the fake says %s\nPostgres says %s: %v", a, b, realErr)
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

// sane checks the difference of two times that clocks tell.
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
		t.Errorf("look without %v: the fake says %+v, Postgres %+v", skip, fake, real)
	}
	sane(t, fake.Due-real.Due)
	sane(t, fake.Lag-real.Lag)
	sane(t, fake.Now.Sub(real.Now)) // timing: the clocks of the stores, far apart at most
}

// poisoned finds the rows in a log that were put in quarantine.
var poisoned = regexp.MustCompile(`row=\w+`)

// sweep has a new sweeper work on either.
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
		t.Errorf("the fake's sweep: %s\nthat of Postgres: %s", told[0], told[1])
	}
}

func (tw *twins) check(t *testing.T) {
	t.Helper()
	fake, real := findings(t, tw.fake.Check(t.Context())), findings(t, checked(t, tw.real))
	if len(fake) != len(real) {
		t.Errorf("the fake finds %v, Postgres %v", fake, real)
	}
}

// overdue lists what is overdue in both.
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

// deadline is one of a few, so that some are equal, and none is near now.
func (tw *twins) deadline() time.Time {
	return tw.now.Add(time.Duration(tw.random.IntN(12)-8)*time.Hour + 30*time.Minute)
}

func newRandom(n int) *rand.Rand { return rand.New(rand.NewPCG(4, uint64(n))) }
