package inboxpgx_test

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/silent"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/txretry"
)

// onSilent runs a test in a bubble, with a pool of idle connections to the real server, which has room for as many again.
// The clock stands still while the server works.
func onSilent(t *testing.T, test func(t *testing.T, s *silent.Postgres, pool *pgxpool.Pool)) {
	t.Helper()
	const conns = 4
	url := pgtest.URL(t)
	synctest.Test(t, func(t *testing.T) {
		s := silent.NewPostgres(t, url)
		pool := s.Pool(t, 2*conns)
		createTables(t, pool)
		pgtest.Idle(t, pool, conns)
		test(t, s, pool)
	})
}

// Each wait for a database that has fallen silent ends by itself, and the call works on another connection: the rare ones
// after a ping of 2 s, the others when they are repeated after their timeout of 4 s.
func TestSilentConnections(t *testing.T) {
	t.Parallel()
	pgtest.URL(t) // skips before there are subtests
	for name, tt := range map[string]struct {
		call  func(ctx context.Context, p *inboxpgx.Store) error
		tries int
		took  time.Duration
	}{
		"look":  {func(ctx context.Context, p *inboxpgx.Store) error { return second(p.Ledger().Look(ctx, ids.New())) }, 2, 4 * time.Second},
		"start": {func(ctx context.Context, p *inboxpgx.Store) error { return p.Ledger().Start(ctx, event()) }, 2, 4 * time.Second},
		"pass":  {func(ctx context.Context, p *inboxpgx.Store) error { return p.Ledger().Pass(ctx, event(), time.Hour) }, 2, 4 * time.Second},
		"prune": {func(ctx context.Context, p *inboxpgx.Store) error { return second(p.Prune(ctx)) }, 1, 2 * time.Second},
		"check": {func(ctx context.Context, p *inboxpgx.Store) error { return p.Check(ctx) }, 1, 2 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onSilent(t, func(t *testing.T, s *silent.Postgres, pool *pgxpool.Pool) {
				p := newStore(t, exactManager(t, pool), "a", inboxpgx.Config{})
				s.SilenceConnections()
				start, tries := time.Now(), 1
				for ; tt.call(t.Context(), p) != nil && tries < 10; tries++ {
				}
				if took := time.Since(start); took != tt.took || tries != tt.tries {
					t.Errorf("took %v and %d tries, want %v and %d", took, tries, tt.took, tt.tries)
				}
			})
		})
	}
}

// exactManager makes pauses between tries without chance.
func exactManager(t *testing.T, pool *pgxpool.Pool) *txretry.Manager {
	t.Helper()
	m, err := txretry.New(pool, txretry.Config{Rand: func() float64 { return 0 }, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func second[T any](_ T, err error) error { return err }

// A connection falls silent in the middle of a message's transaction: no message counts a failure, and the message comes
// again, and takes effect once.
func TestSilentTransaction(t *testing.T) {
	t.Parallel()
	pgtest.URL(t)                       // skips before there are subtests
	const lockTimeout = 8 * time.Second // of txretry; a statement and a COMMIT have a second more
	for name, tt := range map[string]struct {
		on   string
		took time.Duration
	}{
		"begin": {"begin", 2 * time.Second}, "statement": {"INSERT INTO effects", lockTimeout + time.Second}, "commit": {"commit", lockTimeout + time.Second},
	} {
		for _, arrives := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, delivered %v", name, arrives), func(t *testing.T) {
				t.Parallel()
				onSilent(t, func(t *testing.T, s *silent.Postgres, pool *pgxpool.Pool) {
					p := effectStore(t, exactManager(t, pool))
					s.SilenceOn(testenv.Silence{On: tt.on, Deliver: arrives})
					m := event()
					start := time.Now()
					var unavailable atomic.Int64
					for !deliver(t, p, m, &unavailable) {
					}
					want := tt.took + time.Duration(unavailable.Load())*10*time.Millisecond // the pause of deliver
					if took := time.Since(start); took != want || s.Silenced() != 1 {
						t.Errorf("took %v, want %v; %d connections silent", took, want, s.Silenced())
					}
					if err := p.Process(t.Context(), []*inbox.Message{m})[0]; err != nil {
						t.Error(err)
					}
					wantOneEffectEach(t, pool, 1)
				})
			})
		}
	}
}
