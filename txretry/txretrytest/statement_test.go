package txretrytest_test

import (
	"context"
	"testing"
	"testing/synctest"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

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
