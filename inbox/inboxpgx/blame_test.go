package inboxpgx_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// A handler that loses its transaction by its own doing has failed: as the server's failure
// it would come again for ever and stop the messages behind it.
func TestHandlerLosesItsTransaction(t *testing.T) {
	t.Parallel()
	for name, work := range map[string]func(t *testing.T, ctx context.Context, tx pgx.Tx) error{
		"own deadline, reported": func(_ *testing.T, ctx context.Context, tx pgx.Tx) error {
			return sleepTooLong(ctx, tx)
		},
		"own deadline, swallowed": func(_ *testing.T, ctx context.Context, tx pgx.Tx) error {
			_ = sleepTooLong(ctx, tx)
			return nil
		},
		"idle for too long": func(t *testing.T, ctx context.Context, tx pgx.Tx) error {
			idleTooLong(t, ctx, tx)
			_, err := tx.Exec(ctx, `SELECT 1`)
			return err
		},
		"idle for too long, then nothing": func(t *testing.T, ctx context.Context, tx pgx.Tx) error {
			idleTooLong(t, ctx, tx)
			return nil
		},
		"rolled back by a statement": func(_ *testing.T, ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `ROLLBACK`)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newPool(t)
			p := newStore(t, newManager(t, pool), "a", inboxpgx.Config{})
			handle(t, p, func(ctx context.Context, tx pgx.Tx, _ conformance.Event) error {
				return work(t, ctx, tx)
			})
			err := process(t, p, event())
			if f := driver.Classify(err); !f.Counted || f.Unlimited || f.Action != driver.ActionRetry {
				t.Errorf("%v classified %+v", err, f)
			}
		})
	}
}

func sleepTooLong(ctx context.Context, tx pgx.Tx) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancel()
	_, err := tx.Exec(ctx, `SELECT pg_sleep(10)`)
	return err
}

var errStillThere = errors.New("the session is still there")

// idleTooLong returns when the server has ended the session, which the client does not know.
func idleTooLong(t *testing.T, ctx context.Context, tx pgx.Tx) {
	t.Helper()
	var pid int
	if err := tx.QueryRow(ctx, `SELECT pg_backend_pid()`).Scan(&pid); err != nil {
		t.Error(err)
	}
	if _, err := tx.Exec(ctx, `SET LOCAL idle_in_transaction_session_timeout = '20ms'`); err != nil {
		t.Error(err)
	}
	watcher, err := pgx.ConnectConfig(ctx, tx.Conn().Config())
	if err != nil {
		t.Error(err)
		return
	}
	defer func() { _ = watcher.Close(ctx) }()
	testenv.Eventually(t, func() error {
		var there bool
		err := watcher.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1)`, pid).Scan(&there)
		if err == nil && there {
			err = errStillThere
		}
		return err
	})
}
