package txretry_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry"
)

func TestHotStandby(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.Postgres)
	pool := pgtest.Pool(t, server.URL(), 4)
	exec(t, pool, "create table counter (id int primary key, n int not null); insert into counter values (1, 7)")
	var data string
	if err := pool.QueryRow(t.Context(), "show data_directory").Scan(&data); err != nil {
		t.Fatal(err)
	}
	if err := server.Stop(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(data, "standby.signal"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := server.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	pool.Reset()

	m, asking := newManager(t, pool, txretry.Config{}), newManager(t, pool, txretry.Config{XactStatus: true})
	look := func(ctx context.Context, tx pgx.Tx) error {
		var n int
		return tx.QueryRow(ctx, "select n from counter").Scan(&n)
	}
	for name, test := range map[string]struct {
		m    *txretry.Manager
		opts txretry.Options
		fn   func(ctx context.Context, tx pgx.Tx) error
		code string // "" works
	}{
		"serializable":           {m, txretry.Options{}, look, "0A000"},
		"write":                  {m, txretry.Options{Isolation: pgx.ReadCommitted}, func(ctx context.Context, tx pgx.Tx) error { return add(ctx, tx, 1) }, "25006"},
		"write, error swallowed": {m, txretry.Options{Isolation: pgx.ReadCommitted}, func(ctx context.Context, tx pgx.Tx) error { _ = add(ctx, tx, 1); return nil }, "25006"},
		"id of the transaction":  {asking, txretry.Options{Isolation: pgx.ReadCommitted}, look, "25006"},
		"read only":              {m, txretry.Options{Isolation: pgx.RepeatableRead, ReadOnly: true}, look, ""},
		"read only, asking":      {asking, txretry.Options{Isolation: pgx.ReadCommitted, ReadOnly: true}, look, ""},
	} {
		err := test.m.DoWith(t.Context(), test.opts, test.fn)
		if test.code == "" {
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		if !errors.Is(err, txretry.ErrStandby) {
			t.Errorf("%s: error %v, want ErrStandby", name, err)
		}
		wantSQLSTATE(t, err, test.code)
	}
}
