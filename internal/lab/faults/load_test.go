package faults_test

import (
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/lab/ledger"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

// name is what all good messages are called.
const name = "faults.done"

// newLoad returns writers whose outbox takes bodies that the broker refuses.
func newLoad(pool *pgxpool.Pool, l *ledger.Ledger, seed uint64, pause time.Duration) (*ledger.Writer, error) {
	store, err1 := outboxpgx.New(pool, outboxpgx.Config{PollOnly: true, MaxBodyBytes: maxBody + 1, Logger: quiet})
	w, err2 := ledger.NewWriter(pool, store, l, name, seed, pause)
	return w, errors.Join(err1, err2)
}

// startLoad has writers at work on the store until stop is called.
func (s *store) startLoad(l *ledger.Ledger, rng *rand.Rand, pause time.Duration) (stop func()) {
	s.t.Helper()
	w, err := newLoad(s.pool, l, rng.Uint64(), pause)
	must(s.t, err)
	return beside(s.t, w.Run)
}

// untilMore waits until n more messages have arrived.
func untilMore(t testing.TB, l *ledger.Ledger, n int) {
	t.Helper()
	before := l.Delivered()
	untilTrue(t, "messages arrive", func() bool { return l.Delivered() >= before+n })
}
