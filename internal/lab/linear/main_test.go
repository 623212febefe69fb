// Package linear checks short histories of concurrent clients with Porcupine, a linearizability checker that others
// wrote. A history is linearizable if each call can be given one moment between its start and its end, so that the
// answers are those of a sequential model. A call that was cut has no end: it takes effect later, or never. The
// package contains tests only.
package linear_test

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// history has the calls of all clients. The zero value is ready. It is safe for concurrent use.
type history struct {
	mu    sync.Mutex
	calls []porcupine.Operation
	seen  map[string]int // outcomes
}

// began is the zero time of all histories.
var began = time.Now()

// now is the time in a history. timing: it orders the calls, and no test compares it with a limit.
func now() int64 { return time.Since(began).Nanoseconds() }

// unknown is the outcome of a call that was cut.
const unknown = "unknown"

// never is the end of a call without an answer.
const never = math.MaxInt64

func (h *history) add(input any, from int64, output any, to int64, outcome string) {
	if outcome == unknown {
		to = never
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.seen == nil {
		h.seen = map[string]int{}
	}
	h.seen[outcome]++
	h.calls = append(h.calls, porcupine.Operation{Input: input, Call: from, Output: output, Return: to})
}

// check returns an error unless the history is linearizable. A check that runs out of time is an error, too.
func (h *history) check(m porcupine.NondeterministicModel) error {
	if result := porcupine.CheckOperationsTimeout(m.ToModel(), h.calls, testenv.Patience); result != porcupine.Ok {
		return fmt.Errorf("a history of %d calls is not linearizable: %s", len(h.calls), result)
	}
	return nil
}

// clients runs each client in a goroutine, with random numbers of its own.
func clients(n int, seed uint64, client func(id int, rng *rand.Rand)) {
	var wg sync.WaitGroup
	for id := range n {
		wg.Go(func() { client(id, rand.New(rand.NewPCG(seed, uint64(id)))) })
	}
	wg.Wait()
}

// cutNow returns a context that ends within a millisecond, for one call in eight. timing: the call may end
// before or after it is cut.
func cutNow(ctx context.Context, rng *rand.Rand) (context.Context, context.CancelFunc) {
	if rng.IntN(8) > 0 {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, time.Duration(rng.IntN(1000))*time.Microsecond)
}
