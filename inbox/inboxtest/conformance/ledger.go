package conformance

import (
	"sync"
	"testing"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// TestLedger holds a driver.Ledger to what it promises. newLedgers returns one per consumer, all
// in the same place, without entries.
func TestLedger(t *testing.T, newLedgers func(t *testing.T) func(consumer string) driver.Ledger) {
	for name, test := range map[string]func(*testing.T, ledgerTester){
		"runs":       testLedgerRuns,
		"leftovers":  testLedgerLeftovers,
		"replays":    testLedgerReplays,
		"concurrent": testLedgerConcurrent,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ledgers := newLedgers(t)
			test(t, ledgerTester{ledgers("a"), ledgers("b")})
		})
	}
}

type ledgerTester struct {
	driver.Ledger
	other driver.Ledger // of another consumer
}

func (l ledgerTester) do(t *testing.T, m *inbox.Message, steps ...string) {
	t.Helper()
	for _, step := range steps {
		var err error
		switch step {
		case "start":
			err = l.Start(t.Context(), m)
		case "end":
			err = l.End(t.Context(), m)
		case "pass":
			err = l.Pass(t.Context(), m)
		case "forget":
			err = l.Forget(t.Context(), m.ID)
		default:
			t.Fatalf("no step %q", step)
		}
		if err != nil {
			t.Fatalf("%s: %v", step, err)
		}
	}
}

func (l ledgerTester) want(t *testing.T, m *inbox.Message, open int, leftover bool) {
	t.Helper()
	e, err := l.Look(t.Context(), m.ID)
	if err != nil {
		t.Fatalf("Look: %v", err)
	}
	if got := e.OpenRuns(m); got != open {
		t.Errorf("%d open runs, want %d: %+v", got, open, e)
	}
	if got := e.Supersedes(m); got != leftover {
		t.Errorf("attempt %d of replay %d: leftover %v, want %v: %+v", m.Attempt, m.Replays, got, leftover, e)
	}
}

func testLedgerRuns(t *testing.T, l ledgerTester) {
	m, other := event(1), event(2)
	l.want(t, m, 0, false)
	l.do(t, m, "start", "start")
	l.do(t, other, "start")
	l.want(t, m, 2, false)
	l.want(t, other, 1, false)
	ledgerTester{Ledger: l.other}.want(t, m, 0, false)
	l.do(t, m, "end")
	l.want(t, m, 0, false)
	l.do(t, m, "start")
	l.want(t, m, 1, false)
	l.do(t, m, "forget", "forget", "end")
	l.want(t, m, 0, false)
}

func testLedgerLeftovers(t *testing.T, l ledgerTester) {
	first := event(1)
	second, third := *first, *first
	second.Attempt, third.Attempt = 2, 3
	l.do(t, first, "pass")
	l.want(t, first, 0, true)
	l.want(t, &second, 0, false)
	l.do(t, &second, "start", "pass")
	l.do(t, first, "start", "pass") // a leftover that had begun before takes nothing back
	l.want(t, &second, 0, true)
	l.want(t, &third, 0, false)
	l.do(t, &third, "forget")
	l.want(t, first, 0, false)
}

func testLedgerReplays(t *testing.T, l ledgerTester) {
	late := event(1)
	late.Attempt = 6
	replayed := *late
	replayed.Attempt, replayed.Replays = 1, 1
	l.do(t, late, "pass", "start", "start")
	l.want(t, &replayed, 0, false)
	l.do(t, &replayed, "start")
	l.want(t, &replayed, 1, false)
	l.want(t, late, 1, true)
	l.do(t, &replayed, "pass")
	l.want(t, &replayed, 0, true)
}

func testLedgerConcurrent(t *testing.T, l ledgerTester) {
	const n = 8
	m := event(1)
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			if err := l.Start(t.Context(), m); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	l.want(t, m, n, false)
}
