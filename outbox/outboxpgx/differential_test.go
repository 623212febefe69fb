package outboxpgx_test

import (
	"context"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// Random calls of writers, relays and operators come to the same on Postgres and on the fake, step by
// step, but for the texts of errors. A sequence is told by its seed: half of them are the same in every
// run.
func TestDifferentialOutbox(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	f.store.Claims(driver.Lanes, 0)
	sequences := testenv.Sequences(t, 60)
	first := rand.Uint64()
	t.Logf("the random half begins with the seed %d", first)
	claimed := 0
	for n := range sequences {
		seed := uint64(n)
		if n >= sequences/2 {
			seed = first + uint64(n-sequences/2)
		}
		on, off := newScript(f.side(t), seed), newScript(fakeSide(), seed)
		on.run(t.Context())
		off.run(t.Context())
		if !slices.Equal(on.trace, off.trace) {
			t.Fatalf("seed %d, on Postgres:\n%s\n\non the fake:\n%s", seed, strings.Join(on.trace, "\n"), strings.Join(off.trace, "\n"))
		}
		claimed += on.claimed
	}
	t.Logf("%d sequences, %d messages claimed", sequences, claimed)
	if claimed < sequences {
		t.Error("that proves little")
	}
}

// side is what a script is run on.
type side struct {
	manager txretry.Transactor
	writer  interface {
		Write(ctx context.Context, tx pgx.Tx, msgs ...outbox.Message) error
		WriteOnce(ctx context.Context, tx pgx.Tx, key string, m outbox.Message) (id uuid.UUID, first bool, err error)
	}
	source interface {
		driver.Source
		driver.Measured
		Waiting(ctx context.Context, f outbox.WaitingFilter) ([]outbox.Waiting, error)
	}
	fail func(ctx context.Context, tx pgx.Tx) error
	dead outbox.DeadLetters
}

// side empties the tables.
func (f *fixture) side(t *testing.T) side {
	t.Helper()
	f.exec(t, `
		DELETE FROM holdfast_outbox; DELETE FROM holdfast_outbox_dead; DELETE FROM holdfast_outbox_dedup;
		UPDATE holdfast_outbox_lanes SET token = NULL, lease_until = '-infinity', batch = 0, suspect = NULL, alone = NULL, losses = 0`)
	return side{
		manager: f.manager, writer: f.store, source: f.store,
		fail: func(ctx context.Context, tx pgx.Tx) error { return second(tx.Exec(ctx, "SELECT 1/0")) },
		dead: f.dead,
	}
}

func fakeSide() side {
	store := outboxtest.New()
	return side{
		manager: txretrytest.New(txretrytest.Config{}), writer: store, source: store,
		fail: func(_ context.Context, tx pgx.Tx) error {
			return txretrytest.Fail(tx, &pgconn.PgError{Severity: "ERROR", Code: "22012"})
		},
		dead: store.DeadLetters(),
	}
}
