package txretry_test

import (
	"context"
	"errors"
	"net/http"
	"os"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// The code of README.md, so that the compiler reads it too.

var _ = []any{guideNew, guideTransfer, guideEffects, guideSerial, guideSavepoint, guideWitness, guideErrors, guideProve}

func guideNew(ctx context.Context) (*txretry.Manager, error) {
	cfg, err := pgxpool.ParseConfig(os.Getenv("DATABASE_URL"))
	if err != nil {
		return nil, err
	}
	txretry.PreparePool(cfg) // bounds how long the pool connects, pings and closes
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, err
	}
	return txretry.New(pool, txretry.Config{})
}

type account struct{ from, to string }

func guideTransfer(ctx context.Context, manager *txretry.Manager, a account, cents int) error {
	return manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
		var balance int
		if err := tx.QueryRow(ctx, "SELECT cents FROM accounts WHERE id = $1", a.from).Scan(&balance); err != nil {
			return err
		}
		if balance < cents {
			return errPoor // rolled back, and returned as it is
		}
		if _, err := tx.Exec(ctx, "UPDATE accounts SET cents = cents - $2 WHERE id = $1", a.from, cents); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, "UPDATE accounts SET cents = cents + $2 WHERE id = $1", a.to, cents)
		return err
	})
}

var errPoor = errors.New("not enough money")

func guideEffects(ctx context.Context, manager *txretry.Manager, id string, mail func(id string)) error {
	return manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
		txretry.AtCommit(tx, "INSERT INTO audit (account) VALUES ($1)", id) // sent with COMMIT: no round trip more
		txretry.AfterCommit(tx, func() { mail(id) })                        // once, if it has committed
		_, err := tx.Exec(ctx, "UPDATE accounts SET closed = true WHERE id = $1", id)
		return err
	})
}

func guideSerial(ctx context.Context, manager *txretry.Manager, event string, buy func(ctx context.Context, tx pgx.Tx) error) error {
	return manager.DoWith(ctx, txretry.Options{Name: "tickets.buy", SerialKey: "event:" + event}, buy)
}

func guideSavepoint(ctx context.Context, manager *txretry.Manager, reserve func(ctx context.Context, tx pgx.Tx) error) error {
	return manager.DoWith(ctx, txretry.Options{Name: "seat.reserve", Savepoint: true}, reserve)
}

func guideWitness(ctx context.Context, manager *txretry.Manager, order string, place func(ctx context.Context, tx pgx.Tx) error) error {
	opts := txretry.Options{Witness: func(ctx context.Context, tx pgx.Tx) (committed bool, err error) {
		_, err = tx.Exec(ctx, "INSERT INTO orders (id) VALUES ($1)", order) // waits for the lost transaction
		var refused *pgconn.PgError
		if errors.As(err, &refused) && refused.Code == "23505" {
			return true, nil
		}
		return false, err // no error: the row was not there
	}}
	return manager.DoWith(ctx, opts, place)
}

func guideErrors(w http.ResponseWriter, err error) {
	coded, ok := errors.AsType[interface {
		error
		Code() string
		HTTPStatus() int
	}](err)
	if ok {
		http.Error(w, coded.Code(), coded.HTTPStatus())
	}
}

func guideProve(t *testing.T, pool *pgxpool.Pool) {
	proof := txretrytest.Proof{Pool: pool, Reset: "TRUNCATE orders", Rows: []string{"SELECT id, cents FROM orders"}}
	txretrytest.Prove(t, proof, func(pool *pgxpool.Pool) (run func(ctx context.Context) error, err error) {
		manager, err := txretry.New(pool, txretry.Config{})
		return func(ctx context.Context) error { return placeOrder(ctx, manager) }, err
	})
}

func placeOrder(ctx context.Context, manager *txretry.Manager) error {
	return manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "INSERT INTO orders (id, cents) VALUES ('o1', 4200)")
		return err
	})
}
