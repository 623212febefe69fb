package conformance

import (
	"context"
	"crypto/rand"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/internal/trace/keys"
	"github.com/holdfast-go/holdfast/txretry"
)

// Each process fails once, in one of these ways.
const (
	diesBefore    = iota // before COMMIT: its claim stays until the lease ends
	diesAfter            // after COMMIT: the gate does not get the answer
	fails                // the work fails
	beginUnsent          // the gate is away
	beginLost            // the gate's answer to a claim is lost
	completeLost         // the gate's answer to the end of a run is lost
	commitLost           // the answer to COMMIT is lost
	commitRefused        // COMMIT has no answer and no effect
	works
	ways
)

var errProcess = errors.New("scripted")

// process is a process that fails in a way. Its store has the recorders of a run outside, and the faults inside.
type process struct {
	driver.Store // the gate
	transactor   txretry.Transactor
	way          int
	failed       atomic.Bool
	dead         atomic.Bool
}

// now reports whether the process fails in this way now.
func (p *process) now(way int) bool { return p.way == way && p.failed.CompareAndSwap(false, true) }

func (p *process) Begin(ctx context.Context, c driver.Claim) (driver.BeginResult, error) {
	if p.dead.Load() || p.now(beginUnsent) {
		return driver.BeginResult{}, errProcess
	}
	out, err := p.Store.Begin(ctx, c)
	if p.now(beginLost) {
		return driver.BeginResult{}, errProcess
	}
	return out, err
}

func (p *process) Extend(ctx context.Context, c driver.Claim) error {
	if p.dead.Load() {
		return errProcess
	}
	return p.Store.Extend(ctx, c)
}

func (p *process) Complete(ctx context.Context, c driver.Claim, resp driver.Response) error {
	if p.dead.Load() || p.now(diesAfter) {
		return errProcess
	}
	err := p.Store.Complete(ctx, c, resp)
	if p.now(completeLost) {
		return errProcess
	}
	return err
}

func (p *process) Release(ctx context.Context, c driver.Claim) error {
	if p.dead.Load() {
		return errProcess
	}
	return p.Store.Release(ctx, c)
}

// faulty is the transactor of a process.
type faulty struct {
	txretry.Transactor
	p *process
}

func (f faulty) DoWith(ctx context.Context, o txretry.Options, fn func(context.Context, pgx.Tx) error) error {
	switch {
	case f.p.now(commitLost):
		return lossy{f.Transactor, true}.DoWith(ctx, o, fn)
	case f.p.now(commitRefused):
		return lossy{f.Transactor, false}.DoWith(ctx, o, fn)
	}
	return f.Transactor.DoWith(ctx, o, fn)
}

// TestModel lets callers of different processes, which die and lose answers, send the same keys until they have an answer.
// The run must be one of keys.pml in internal/lab/models. Without a Bubble it waits for the leases of the gate.
func TestModel(t *testing.T, b RecordsBackend) {
	b.run(t, "runs of the model", testRunOfTheModel)
}

func testRunOfTheModel(t *testing.T, db Database) {
	const names, callers = 6, 3
	log := keys.New()
	gate, gated := db.gate(t), []bool{true, false}
	var running sync.WaitGroup
	var all []idempotency.Key
	for n := range names * len(gated) {
		key := idempotency.NewKey()
		all = append(all, key)
		for c := range callers {
			running.Go(func() { callUntilAnswered(t, db, log, gate, gated[n%2], key, (n*callers+c*2)%ways) })
		}
	}
	running.Wait()
	for _, key := range all {
		if n := db.Count(t, string(key)); n != 1 {
			t.Errorf("%d effects, want 1", n)
		}
	}
	t.Log(log.Counts())
	if err := log.Check(); err != nil {
		t.Error(err)
	}
}

func callUntilAnswered(t *testing.T, db Database, log *keys.Log, gate driver.Store, gated bool, key idempotency.Key, way int) {
	for deadline := time.Now().Add(2 * lease); ; { // a claim of a dead process lasts for a lease
		p := &process{Store: gate, way: way}
		cfg := idempotencypgx.Config{Records: log.Records(db.Records)}
		if gated {
			cfg.Gate = log.Gate(p)
		}
		store, err := idempotencypgx.New(log.Transactor(faulty{db.Transactor, p}), cfg)
		if err != nil {
			t.Error(err)
			return
		}
		for !p.dead.Load() {
			err := log.Call(driver.Key(key), func() (string, error) {
				resp, _, err := store.DoKey(t.Context(), key, nil, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
					switch {
					case p.now(diesBefore):
						p.dead.Store(true)
						return idempotency.Response{}, errProcess
					case p.now(fails):
						return idempotency.Response{}, errProcess
					}
					return idempotency.Response{Status: 200, Body: []byte(rand.Text())}, db.Add(ctx, tx, string(key))
				})
				return string(resp.Body), err
			})
			if err == nil {
				return
			}
			if time.Now().After(deadline) {
				t.Errorf("no answer: %v", err)
				return
			}
			time.Sleep(10 * time.Millisecond) // timing: the pause of a caller
		}
		way = works // the next process
	}
}
