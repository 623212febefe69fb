package faults_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/lab/ledger"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

// store is a database with an outbox and the tables of the business.
type store struct {
	t    testing.TB
	url  string
	pool *pgxpool.Pool
}

// newStore makes an outbox on the database at url, without any table so far.
func newStore(t testing.TB, url string) *store {
	t.Helper()
	s := &store{t: t, url: url, pool: pgtest.Pool(t, url, 10)}
	messages, err := outboxpgx.New(s.pool, outboxpgx.Config{})
	must(t, err)
	must(t, messages.Migrate(t.Context()))
	must(t, ledger.Migrate(t.Context(), s.pool))
	return s
}

// deeds are what has committed.
func (s *store) deeds() []ledger.Deed {
	s.t.Helper()
	deeds, err := ledger.Deeds(s.t.Context(), s.pool)
	must(s.t, err)
	return deeds
}

// count returns the first column of the one row that sql yields.
func (s *store) count(sql string, args ...any) int64 {
	s.t.Helper()
	n, err := s.tryCount(sql, args...)
	must(s.t, err)
	return n
}

func (s *store) tryCount(sql string, args ...any) (n int64, err error) {
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	return n, s.pool.QueryRow(ctx, sql, args...).Scan(&n)
}

// untilEmpty waits until nothing is left to publish.
func (s *store) untilEmpty(patience time.Duration) {
	s.t.Helper()
	testenv.Eventually(s.t, func() error {
		n, err := s.tryCount(`SELECT count(*) FROM holdfast_outbox`)
		if err == nil && n > 0 {
			err = fmt.Errorf("%d messages left in the outbox", n)
		}
		return err
	})
}

// bounds are how much of what is no loss the faults of a test explain.
type bounds struct {
	duplicates int
	depth      int // how far a repeat may come behind the newest of its key
	excused    int
}

const patience = testenv.Patience

// settle waits until all that committed has left the outbox and has arrived, or does not. The
// writers have ended.
func (s *store) settle(l *ledger.Ledger) []ledger.Deed {
	s.t.Helper()
	s.untilEmpty(patience)
	deeds := s.deeds()
	for began := time.Now(); len(l.Missing(deeds)) > 0 && time.Since(began) < patience; {
		time.Sleep(50 * time.Millisecond)
	}
	return deeds
}

// judge fails the test over whatever the ledger holds against it.
func judge(t testing.TB, l *ledger.Ledger, deeds []ledger.Deed, b bounds) ledger.Verdict {
	t.Helper()
	v := l.Audit(deeds)
	t.Log(v)
	if len(deeds) == 0 {
		t.Error("nothing was written: the test shows nothing")
	}
	for _, fault := range v.Faults {
		t.Error(fault)
	}
	if v.Duplicates > b.duplicates {
		t.Errorf("%d duplicates, the faults explain %d", v.Duplicates, b.duplicates)
	}
	if v.Depth > b.depth {
		t.Errorf("a repeat came %d behind, the faults explain %d", v.Depth, b.depth)
	}
	if v.Excused > b.excused {
		t.Errorf("%d messages were excused, the faults explain %d", v.Excused, b.excused)
	}
	return v
}

// noDeadLetters is for faults that cost no message its attempts.
func (s *store) noDeadLetters() {
	s.t.Helper()
	if n := s.count(`SELECT count(*) FROM holdfast_outbox_dead`); n > 0 {
		s.t.Errorf("%d dead letters", n)
	}
}
