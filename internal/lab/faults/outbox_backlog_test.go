package faults_test

import (
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/internal/lab/backlog"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// fill writes a backlog of n messages.
func (s *store) fill(n int64) {
	s.t.Helper()
	must(s.t, backlog.Fill(s.t.Context(), s.pool, 1, n, backlog.Body(512)))
}

// However much lies in the table, a relay has no more of it in memory than its batches.
func TestOutboxBacklogMemory(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.Postgres)
	s := newStore(t, server.URL())
	n := int64(scaled(t, 100_000))
	s.fill(n)
	c := spawn(t, "backlog", backlogJob{s.url, n})
	var report backlogReport
	c.wait(&report)
	t.Logf("%d messages in %.1f s, %.0f/s; heap at most %.1f MiB in the first quarter, %.1f MiB in the rest; live %.1f and %.1f MiB",
		n, report.Seconds, float64(n)/report.Seconds, mib(report.First.Heap), mib(report.Rest.Heap), mib(report.First.Live), mib(report.Rest.Live))
	const slack = 4 << 20
	for _, m := range []struct {
		what        string
		first, rest uint64
	}{{"heap", report.First.Heap, report.Rest.Heap}, {"live heap", report.First.Live, report.Rest.Live}} {
		if m.first == 0 || m.rest > m.first*5/4+slack {
			t.Errorf("the %s grows from %.1f to %.1f MiB", m.what, mib(m.first), mib(m.rest))
		}
	}
	s.untilEmpty(0)
}

func mib(bytes uint64) float64 { return float64(bytes) / (1 << 20) }

// Another session holds an old snapshot, so that Postgres may forget no row that is published. The
// relay keeps its pace.
func TestOutboxOldSnapshot(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.Postgres)
	s := newStore(t, server.URL())
	n := int64(min(scaled(t, 30_000), 300_000))
	pairs, least := 3, 0.9
	if !long(t) { // other packages run beside: one pair that they leave alone is enough
		pairs, least = 5, 0.6
	}
	var ratios []float64
	for i := range pairs {
		var rates [2]float64 // without and with
		for k := range 2 {
			with := (i + k) % 2
			rates[with] = s.drainRate(n, with == 1)
		}
		ratios = append(ratios, rates[1]/rates[0])
		t.Logf("%d messages: %.0f/s without the snapshot, %.0f/s with it, ratio %.2f", n, rates[0], rates[1], rates[1]/rates[0])
		if !long(t) && rates[1]/rates[0] >= least {
			return
		}
	}
	slices.Sort(ratios)
	if median := ratios[len(ratios)/2]; median < least {
		t.Errorf("the ratio is %.2f (median), want at least %.1f", median, least)
	}
}

// drainRate returns the messages per second of a drain, under an old snapshot or not.
func (s *store) drainRate(n int64, underSnapshot bool) float64 {
	s.t.Helper()
	ctx := s.t.Context()
	_, err := s.pool.Exec(ctx, `TRUNCATE holdfast_outbox`)
	must(s.t, err)
	if underSnapshot {
		old, err := s.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
		must(s.t, err)
		defer old.Rollback(ctx)
		var rows int64
		must(s.t, old.QueryRow(ctx, `SELECT count(*) FROM counters`).Scan(&rows)) // a TRUNCATE would wait for who read the outbox
	}
	s.fill(n)
	took, err := drainAll(ctx, s.pool, n, func(int64) {})
	must(s.t, err)
	s.untilEmpty(0)
	return float64(n) / took.Seconds()
}
