package pgtest_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/pgtest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// The code of examples/guides/testing.md.

var errSoldOut = errors.New("sold out")

type order struct {
	ID string `json:"id"`
}

// snippet: code under test

// shop sells. Its ports are SQL and *outboxpgx.Store in production.
type shop struct {
	manager txretry.Transactor
	take    func(ctx context.Context, tx pgx.Tx) (left int, err error)
	outbox  interface {
		Write(ctx context.Context, tx pgx.Tx, messages ...outbox.Message) error
	}
}

func (s shop) sell(ctx context.Context, o order) error {
	return s.manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
		left, err := s.take(ctx, tx)
		if err != nil {
			return err
		}
		if left < 0 {
			return errSoldOut
		}
		m, err := outbox.NewMessage("order.placed", o)
		if err != nil {
			return err
		}
		return s.outbox.Write(ctx, tx, m)
	})
}

func take(ctx context.Context, tx pgx.Tx) (left int, err error) {
	err = tx.QueryRow(ctx, "UPDATE stock SET n = n - 1 RETURNING n").Scan(&left)
	return left, err
}

// snippet: on Postgres

func TestSellOnPostgres(t *testing.T) {
	pool := pgtest.New(t)
	if _, err := pool.Exec(t.Context(), "CREATE TABLE stock (n int NOT NULL); INSERT INTO stock VALUES (1)"); err != nil {
		t.Fatal(err)
	}
	manager, err := txretry.New(pool, txretry.Config{})
	if err != nil {
		t.Fatal(err)
	}
	store, err := outboxpgx.New(pool, outboxpgx.Config{})
	if err != nil {
		t.Fatal(err)
	}
	if err := store.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	s := shop{manager, take, store}
	if err := s.sell(t.Context(), order{ID: "o1"}); err != nil {
		t.Error(err)
	}
	if err := s.sell(t.Context(), order{ID: "o2"}); !errors.Is(err, errSoldOut) {
		t.Errorf("error %v, want %v", err, errSoldOut)
	}
	var left, messages int
	row := pool.QueryRow(t.Context(), "SELECT (SELECT n FROM stock), (SELECT count(*) FROM holdfast_outbox)")
	if err := row.Scan(&left, &messages); err != nil || left != 0 || messages != 1 {
		t.Errorf("%d left, %d messages, error %v", left, messages, err)
	}
}

// snippet: in memory

// memory replaces the tables. Each change has a function that undoes it.
type memory struct {
	stock    int
	messages []outbox.Message
}

func (m *memory) take(_ context.Context, tx pgx.Tx) (left int, err error) {
	err = txretrytest.Effect(tx, func() { m.stock-- }, func() { m.stock++ })
	return m.stock, err
}

func (m *memory) Write(_ context.Context, tx pgx.Tx, messages ...outbox.Message) error {
	before := m.messages
	return txretrytest.Effect(tx, func() { m.messages = append(before, messages...) }, func() { m.messages = before })
}

// snippet: with faults

func TestSellSurvivesConflicts(t *testing.T) {
	for name, fault := range map[string]txretrytest.Fault{
		"a conflict at the first statement": {Point: txretrytest.AtStatement, Statement: 1, SQLSTATE: "40001"},
		"a conflict when all is done":       {Point: txretrytest.AtEnd, SQLSTATE: "40001"},
		"a conflict at COMMIT":              {Point: txretrytest.AtCommit, SQLSTATE: "40001"},
		"a lock that is not free":           {Point: txretrytest.AtStatement, Statement: 2, SQLSTATE: "55P03"},
	} {
		synctest.Test(t, func(t *testing.T) { // delays take no time
			data := &memory{stock: 1}
			manager := txretrytest.New(txretrytest.Config{Script: []txretrytest.Fault{fault}})
			s := shop{manager, data.take, data}
			if err := s.sell(t.Context(), order{ID: "o1"}); err != nil || manager.Stats().Attempts != 2 {
				t.Errorf("%s: error %v after %d attempts", name, err, manager.Stats().Attempts)
			}
			if data.stock != 0 || len(data.messages) != 1 {
				t.Errorf("%s: %d left, %d messages", name, data.stock, len(data.messages))
			}
		})
	}
}

// snippet: unknown

func TestSellWithoutAnAnswer(t *testing.T) {
	data := &memory{stock: 1}
	manager := txretrytest.New(txretrytest.Config{Script: []txretrytest.Fault{{Point: txretrytest.ReplyLostApplied}}})
	err := shop{manager, data.take, data}.sell(t.Context(), order{ID: "o1"})
	if _, unknown := errors.AsType[*txretry.CommitUnknownError](err); !unknown {
		t.Errorf("error %v, want one that says that the outcome is unknown", err)
	}
}

// snippet: proof

func TestSellIsProven(t *testing.T) {
	proof := txretrytest.Proof{
		Pool:  newSchema(t), // with empty tables
		Reset: "TRUNCATE stock, holdfast_outbox; INSERT INTO stock VALUES (1)",
		Rows:  []string{"TABLE stock", "SELECT name, convert_from(body, 'UTF8') FROM holdfast_outbox"},
	}
	txretrytest.Prove(t, proof, func(pool *pgxpool.Pool) (func(context.Context) error, error) {
		s, err := newShop(pool) // as main does
		return func(ctx context.Context) error { return s.sell(ctx, order{ID: "o1"}) }, err
	})
}

// snippet: end

func newShop(pool *pgxpool.Pool) (shop, error) {
	manager, err := txretry.New(pool, txretry.Config{})
	if err != nil {
		return shop{}, err
	}
	store, err := outboxpgx.New(pool, outboxpgx.Config{})
	return shop{manager, take, store}, err
}

func newSchema(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool := pgtest.New(t)
	store, err := outboxpgx.New(pool, outboxpgx.Config{})
	if err != nil {
		t.Fatal(err)
	}
	if err := store.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), "CREATE TABLE stock (n int NOT NULL)"); err != nil {
		t.Fatal(err)
	}
	return pool
}
