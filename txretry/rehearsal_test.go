package txretry_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

func TestRehearsalOnPostgres(t *testing.T) {
	t.Parallel()
	pool := newCounter(t)
	cfg, _ := observed()
	r := txretrytest.Rehearse(newManager(t, pool, cfg), 3)
	runs, committed := 0, 0
	err := r.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		runs++
		txretry.AfterCommit(tx, func() { committed++ })
		return add(ctx, tx, 1)
	})
	if err != nil || runs != 3 || committed != 1 {
		t.Errorf("error %v, %d runs, %d committed", err, runs, committed)
	}
	wantCounter(t, pool, 1)
}
