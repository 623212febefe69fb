package conformance

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	pgxdriver "github.com/holdfast-go/holdfast/idempotency/idempotencypgx/driver"
	"github.com/holdfast-go/holdfast/txretry"
)

// lossy loses the answer to COMMIT.
type lossy struct {
	txretry.Transactor
	applied bool
}

func (l lossy) DoWith(ctx context.Context, opts txretry.Options, fn func(context.Context, pgx.Tx) error) error {
	aborted := errors.New("aborted")
	err := l.Transactor.DoWith(ctx, opts, func(ctx context.Context, tx pgx.Tx) error {
		if err := fn(ctx, tx); err != nil || l.applied {
			return err
		}
		return aborted
	})
	if err == nil || errors.Is(err, aborted) {
		return &txretry.CommitUnknownError{Err: errors.New("connection lost")}
	}
	return err
}

func testUnknownApplied(t *testing.T, db Database) {
	key := idempotency.NewKey()
	lost := db
	lost.Transactor, lost.Records = lossy{db.Transactor, true}, committing{db.Records}
	s, gate := newShop(lost, idempotency.MiddlewareConfig{}), db.gate(t)
	first := s.behind(t, gate, s.order(key)).post(key)
	if first.is(t, 201, ""); first.replayed() {
		t.Error("the first answer is marked")
	}
	if again := s.behind(t, gate, s.order(key)).post(key); again.body != first.body || !again.replayed() {
		t.Errorf("again: %+v; want %q", again, first.body)
	}
	s.once(t, key)
}

// committing has records that a plain look does not see yet.
type committing struct{ pgxdriver.Records }

func (committing) Lookup(context.Context, driver.Key) (pgxdriver.Record, bool, error) {
	return pgxdriver.Record{}, false, nil
}

func testUnknownNotApplied(t *testing.T, db Database) {
	key := idempotency.NewKey()
	lost := db
	lost.Transactor = lossy{db.Transactor, false}
	s, gate := newShop(lost, idempotency.MiddlewareConfig{}), db.gate(t)
	s.behind(t, gate, s.order(key)).post(key).is(t, 503, "")
	unknown := (*txretry.CommitUnknownError)(nil)
	if !errors.Is(s.err, idempotencypgx.ErrNotCommitted) || errors.As(s.err, &unknown) {
		t.Errorf("Do = %v; want ErrNotCommitted alone", s.err)
	}
	s = newShop(db, idempotency.MiddlewareConfig{})
	s.behind(t, gate, s.order(key)).post(key).is(t, 201, "")
	s.once(t, key)
}

// The answer is that of the attempt which committed.
func testRunRetried(t *testing.T, db Database) {
	s, key, gate, attempts := newShop(db, idempotency.MiddlewareConfig{}), idempotency.NewKey(), db.gate(t), 0
	first := s.behind(t, gate, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		if err := db.Add(ctx, tx, string(key)); err != nil {
			return idempotency.Response{}, err
		}
		if attempts++; attempts < 3 {
			return idempotency.Response{Status: 200, Body: []byte("undone")}, &pgconn.PgError{Code: "40001"}
		}
		return idempotency.Response{Status: 201, Body: []byte("done")}, nil
	}).post(key)
	if first.is(t, 201, ""); first.body != "done" || attempts != 3 {
		t.Errorf("answer %q after %d attempts", first.body, attempts)
	}
	for _, gate := range []driver.Store{gate, db.gate(t)} {
		if again := s.behind(t, gate, s.order(key)).post(key); again.body != "done" || !again.replayed() {
			t.Errorf("again: %+v", again)
		}
	}
	s.once(t, key)
}

// blind cannot read its records.
type blind struct{ pgxdriver.Records }

var errBlind = errors.New("records are down")

func (blind) Lookup(context.Context, driver.Key) (pgxdriver.Record, bool, error) {
	return pgxdriver.Record{}, false, errBlind
}

func (blind) Resolve(context.Context, driver.Key) (pgxdriver.Record, bool, error) {
	return pgxdriver.Record{}, false, errBlind
}

func testRecordsDown(t *testing.T, db Database) {
	key, taken := idempotency.NewKey(), errors.New("seat taken")
	down := db
	down.Records = blind{db.Records}
	s, gate := newShop(down, idempotency.MiddlewareConfig{}), db.gate(t)
	s.behind(t, gate, func(context.Context, pgx.Tx) (idempotency.Response, error) {
		return idempotency.Response{}, taken
	}).post(key)
	if errors.Is(s.err, taken) || !errors.Is(s.err, errBlind) {
		t.Errorf("Do = %v; an unproven failure must not be believed", s.err)
	}

	down.Transactor = lossy{db.Transactor, true}
	s = newShop(down, idempotency.MiddlewareConfig{})
	s.behind(t, gate, s.order(key)).post(key).is(t, 503, "")
	if _, unknown := errors.AsType[*txretry.CommitUnknownError](s.err); !unknown {
		t.Errorf("Do = %v; want the unknown outcome", s.err)
	}
	s = newShop(db, idempotency.MiddlewareConfig{})
	if again := s.behind(t, gate, s.order(key)).post(key); again.status != 201 || !again.replayed() {
		t.Errorf("again: %+v; want the committed answer", again)
	}
	s.once(t, key)
}
