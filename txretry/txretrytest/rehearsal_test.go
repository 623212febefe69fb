package txretrytest_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

func rehearse(cfg txretrytest.Config, runs int) txretry.Transactor {
	return txretrytest.Rehearse(txretrytest.New(cfg), runs)
}

func TestRehearsal(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var c counter
		r := rehearse(txretrytest.Config{}, 3)
		captured, nested, committed := 0, 0, 0
		err := r.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
			captured++ // the mistake that a rehearsal shows
			txretry.AfterCommit(tx, func() { committed++ })
			if err := c.Add(ctx, tx, 1); err != nil {
				return err
			}
			return r.DoWith(ctx, txretry.Options{Savepoint: true}, func(context.Context, pgx.Tx) error {
				nested++
				return nil
			})
		})
		if err != nil || captured != 3 || nested != 3 || committed != 1 || c.value() != 1 {
			t.Errorf("error %v, %d runs, %d nested, %d committed, counter %d", err, captured, nested, committed, c.value())
		}
	})
}

// Forced runs leave the call its own attempts, and an error is not forced.
func TestRehearsalAttempts(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		script := make([]txretrytest.Fault, 6)
		for i := range script {
			script[i] = txretrytest.Fault{Point: txretrytest.AtStatement, Statement: 1, SQLSTATE: "40001"}
		}
		var c counter
		r := rehearse(txretrytest.Config{Script: script[:5]}, 2)
		runs := 0
		add := func(ctx context.Context, tx pgx.Tx) error { runs++; return c.Add(ctx, tx, 1) }
		if err := r.Do(t.Context(), add); err != nil || runs != 7 || c.value() != 1 {
			t.Errorf("error %v after %d runs, counter %d", err, runs, c.value())
		}
		runs = 0
		r = rehearse(txretrytest.Config{}, 5)
		errNo := errors.New("no")
		if err := r.Do(t.Context(), func(context.Context, pgx.Tx) error { runs++; return errNo }); !errors.Is(err, errNo) || runs != 1 {
			t.Errorf("error %v after %d runs", err, runs)
		}
		if err := r.Do(t.Context(), nil); err == nil {
			t.Error("nil fn: no error")
		}
		if err := r.DoWith(t.Context(), txretry.Options{MaxAttempts: -1}, add); err == nil {
			t.Error("negative MaxAttempts: no error")
		}
	})
}

func TestRehearseRefuses(t *testing.T) {
	t.Parallel()
	for name, wrong := range map[string]func(){
		"no transactor": func() { txretrytest.Rehearse(nil, 2) },
		"one run":       func() { txretrytest.Rehearse(txretrytest.New(txretrytest.Config{}), 1) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			wrong()
		}()
	}
}

func TestFaultAtStatement(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var c counter
		m := txretrytest.New(txretrytest.Config{Script: []txretrytest.Fault{
			{Point: txretrytest.AtStatement, Statement: 2, SQLSTATE: "40P01"},
			{Point: txretrytest.AtStatement, Statement: 9, SQLSTATE: "40001"}, // never reached
		}})
		var ok []int
		err := m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
			n := 0
			defer func() { ok = append(ok, n) }()
			for range 3 {
				if err := c.Add(ctx, tx, 1); err != nil {
					return err
				}
				n++
			}
			return nil
		})
		if err != nil || len(ok) != 2 || ok[0] != 1 || ok[1] != 3 || c.value() != 3 {
			t.Errorf("error %v, statements %v, counter %d", err, ok, c.value())
		}
	})
}
