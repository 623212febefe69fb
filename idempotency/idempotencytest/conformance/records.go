package conformance

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	pgxdriver "github.com/holdfast-go/holdfast/idempotency/idempotencypgx/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/txretry"
)

// Database is a business database with a table of records in it.
type Database struct {
	Transactor txretry.Transactor
	Records    pgxdriver.Records
	// Add stores another effect under name, in the transaction.
	Add func(ctx context.Context, tx pgx.Tx, name string) error
	// Count returns the number of committed effects under name.
	Count func(t *testing.T, name string) int
	// Gate returns an empty store for Config.Gate. nil: a store in memory.
	Gate func(t *testing.T) driver.Store
}

func (db Database) gate(t *testing.T) driver.Store {
	t.Helper()
	if db.Gate == nil {
		return idempotencytest.NewStore()
	}
	return db.Gate(t)
}

// RecordsBackend makes the databases under test.
type RecordsBackend struct {
	// New returns a database without records and effects.
	New func(t *testing.T) Database
	// Bubble runs each test in a testing/synctest bubble.
	Bubble bool
}

func (b RecordsBackend) run(t *testing.T, name string, fn func(t *testing.T, db Database)) {
	t.Helper()
	t.Run(name, func(t *testing.T) {
		t.Parallel()
		inBubble(t, b.Bubble, func(t *testing.T) { fn(t, b.New(t)) })
	})
}

// TestRecords tests a Records of idempotencypgx/driver.
func TestRecords(t *testing.T, b RecordsBackend) {
	b.run(t, "a committed record is found", testRecordFound)
	b.run(t, "nobody sees a record before its commit", testRecordUnseen)
	b.run(t, "a record is rolled back with its transaction", testRecordRolledBack)
	b.run(t, "a second record stops its transaction", testSecondRecord)
	b.run(t, "a second record stops its transaction, though its error is ignored", testSecondRecordIgnored)
	b.run(t, "a second record below a savepoint", testSecondRecordBelowASavepoint)
	b.run(t, "resolving leaves nothing behind", testResolve)
	b.run(t, "many rivals, one record", testRecordRivals)
}

func newRecord() pgxdriver.Record {
	c := newClaim()
	return pgxdriver.Record{
		Key: c.Key, Token: c.Token, Fingerprint: c.Fingerprint,
		Response: driver.Response{
			Status: 201, Header: http.Header{"Location": {"/a", "/b"}}, Body: []byte("\x00\xff{}"),
		},
	}
}

// insert commits rec together with an effect under its key.
func (db Database) insert(rec pgxdriver.Record) error {
	return db.Transactor.Do(background, func(ctx context.Context, tx pgx.Tx) error {
		if err := db.Add(ctx, tx, string(rec.Key)); err != nil {
			return err
		}
		return db.Records.Insert(ctx, tx, rec)
	})
}

func (db Database) find(t *testing.T, rec pgxdriver.Record) (lookup, resolve bool) {
	t.Helper()
	for _, ask := range []struct {
		found *bool
		fn    func(context.Context, driver.Key) (pgxdriver.Record, bool, error)
	}{{&lookup, db.Records.Lookup}, {&resolve, db.Records.Resolve}} {
		got, found, err := ask.fn(t.Context(), rec.Key)
		must(t, "find record", err)
		if *ask.found = found; !found {
			continue
		}
		if got.Key != rec.Key || got.Token != rec.Token || got.Fingerprint != rec.Fingerprint {
			t.Errorf("record = %+v, want %+v", got, rec)
		}
		sameResponse(t, got.Response, rec.Response)
	}
	return lookup, resolve
}

func testRecordFound(t *testing.T, db Database) {
	for _, resp := range []driver.Response{newRecord().Response, {}} { // kept, and a tombstone
		rec := newRecord()
		rec.Response = resp
		must(t, "insert", db.insert(rec))
		if lookup, resolve := db.find(t, rec); !lookup || !resolve {
			t.Errorf("Lookup found it: %v, Resolve: %v", lookup, resolve)
		}
	}
}

func testRecordUnseen(t *testing.T, db Database) {
	rec := newRecord()
	must(t, "insert", db.Transactor.Do(background, func(ctx context.Context, tx pgx.Tx) error {
		if err := db.Records.Insert(ctx, tx, rec); err != nil {
			return err
		}
		_, found, err := db.Records.Lookup(background, rec.Key)
		if err == nil && found {
			t.Error("the record is found while its transaction is open")
		}
		return err
	}))
	if found, _ := db.find(t, rec); !found {
		t.Error("the record is not found after the commit")
	}
}

func testRecordRolledBack(t *testing.T, db Database) {
	rec, boom := newRecord(), errors.New("boom")
	err := db.Transactor.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		return errors.Join(boom, db.Records.Insert(ctx, tx, rec))
	})
	if !errors.Is(err, boom) {
		t.Fatalf("Do = %v", err)
	}
	if lookup, resolve := db.find(t, rec); lookup || resolve {
		t.Errorf("found a record that was rolled back: %v, %v", lookup, resolve)
	}
	must(t, "insert", db.insert(rec))
}

func testSecondRecord(t *testing.T, db Database) {
	first := newRecord()
	must(t, "insert", db.insert(first))
	second := newRecord()
	second.Key = first.Key
	if err := db.insert(second); err == nil {
		t.Error("a second record of the key was committed")
	}
	if n := db.Count(t, string(first.Key)); n != 1 {
		t.Errorf("%d effects, want 1", n)
	}
	if lookup, _ := db.find(t, first); !lookup {
		t.Error("the first record is gone")
	}
}

func testSecondRecordIgnored(t *testing.T, db Database) {
	rec := newRecord()
	must(t, "insert", db.insert(rec))
	err := db.Transactor.Do(background, func(ctx context.Context, tx pgx.Tx) error {
		if err := db.Add(ctx, tx, string(rec.Key)); err != nil {
			return err
		}
		_ = db.Records.Insert(ctx, tx, rec) //nolint:errcheck // ignored on purpose
		return nil
	})
	if answer, ok := errors.AsType[*pgconn.PgError](err); !ok || answer.Code != "23505" && answer.Code != "25P02" {
		t.Errorf("Do = %v; want the unique violation, or the end of a failed transaction", err)
	}
	if n := db.Count(t, string(rec.Key)); n != 1 {
		t.Errorf("%d effects, want none of the second run", n)
	}
}

// testSecondRecordBelowASavepoint: the record is written with COMMIT, so a rollback to a savepoint does not remove
// the conflict.
func testSecondRecordBelowASavepoint(t *testing.T, db Database) {
	rec := newRecord()
	must(t, "insert", db.insert(rec))
	err := db.Transactor.Do(background, func(ctx context.Context, tx pgx.Tx) error {
		if err := db.Add(ctx, tx, string(rec.Key)); err != nil {
			return err
		}
		nested, err := tx.Begin(ctx)
		if err != nil {
			return err
		}
		if err := db.Records.Insert(ctx, nested, rec); err != nil {
			return nested.Rollback(ctx)
		}
		return nested.Commit(ctx)
	})
	if err == nil {
		t.Error("a second effect was committed")
	}
	if n := db.Count(t, string(rec.Key)); n != 1 {
		t.Errorf("%d effects, want none of the second run", n)
	}
}

func testResolve(t *testing.T, db Database) {
	rec := newRecord()
	for range 2 {
		if lookup, resolve := db.find(t, rec); lookup || resolve {
			t.Fatalf("found a record that nobody made: %v, %v", lookup, resolve)
		}
	}
	must(t, "insert", db.insert(rec))
}

func testRecordRivals(t *testing.T, db Database) {
	key := newRecord().Key
	var committed atomic.Int32
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			rec := newRecord()
			rec.Key = key
			if db.insert(rec) == nil {
				committed.Add(1)
			}
		})
	}
	wg.Wait()
	if n := db.Count(t, string(key)); n != 1 || committed.Load() != 1 {
		t.Errorf("%d effects, %d commits; want 1 and 1", n, committed.Load())
	}
}

// testOrders makes two runs of one key take their steps in every possible order, including repeated and misplaced
// steps, and compares each result with a model.
func testOrders(t *testing.T, store driver.Store, length int) {
	const steps, workers = 8, 8
	orders := make(chan int)
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for order := range orders {
				if err := takeOrder(store, order, steps, length); err != nil {
					t.Error(err)
				}
			}
		})
	}
	n := 1
	for range length - 1 { // the last step is always the first run's Begin, which returns the final state
		n *= steps
	}
	for order := range n {
		orders <- order
	}
	close(orders)
	wg.Wait()
}

// takeOrder reads order as a number whose digits are steps.
func takeOrder(store driver.Store, order, steps, length int) error {
	first := newClaim()
	runs, model, taken := [2]driver.Claim{first, rival(first)}, model{holder: nobody, done: nobody}, ""
	for range length {
		run, step := order%steps%2, order%steps/2
		order /= steps
		got, want := take(store, runs[run], run, step), model.take(run, step)
		if taken += fmt.Sprintf(" %d.%s", run, stepNames[step]); got != want {
			return fmt.Errorf("after%s: %q, want %q", taken, got, want)
		}
	}
	return nil
}

var stepNames = [...]string{"Begin", "Extend", "Complete", "Release"}

// take returns the result of a step as a word.
func take(store driver.Store, claim driver.Claim, run, step int) string {
	var err error
	switch stepNames[step] {
	case "Begin":
		out, err := store.Begin(context.Background(), claim)
		switch {
		case err != nil:
			return err.Error()
		case out.State == driver.Completed:
			return fmt.Sprint("completed by ", out.Response.Status-200)
		case out.State == driver.Acquired:
			return "acquired"
		}
		return "in progress"
	case "Extend":
		err = store.Extend(context.Background(), claim)
	case "Complete":
		err = store.Complete(context.Background(), claim, driver.Response{Status: 200 + run})
	case "Release":
		err = store.Release(context.Background(), claim)
	}
	switch {
	case errors.Is(err, idempotency.ErrLeaseLost):
		return "lost"
	case err != nil:
		return err.Error()
	}
	return "done"
}

const nobody = -1

// model is the expected state of a key.
type model struct{ holder, done int }

func (m *model) take(run, step int) string {
	switch name := stepNames[step]; {
	case name == "Begin" && m.done != nobody:
		return fmt.Sprint("completed by ", m.done)
	case name == "Begin" && m.holder != nobody && m.holder != run:
		return "in progress"
	case name == "Begin":
		m.holder = run
		return "acquired"
	case name == "Complete" && m.done == run:
		return "done"
	case m.holder != run:
		return "lost"
	case name == "Complete":
		m.holder, m.done = nobody, run
	case name == "Release":
		m.holder = nobody
	}
	return "done"
}
