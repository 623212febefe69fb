package faults_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/lab/ledger"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
)

const (
	// keys is how many ordering keys the writers use.
	keys = 50
	// writers is how many transactions are open at once.
	writers = 3
	// maxPerTx is how many messages a transaction writes at most.
	maxPerTx = 10
	// mostWaiting is how many messages wait in the outbox when the writers stop for a while: a machine
	// that relays more slowly than they write would never be done otherwise.
	mostWaiting = 5000
	// name is what all good messages are called.
	name = "faults.done"
)

// load is a business at work.
type load struct {
	pool    *pgxpool.Pool
	manager *txretry.Manager
	writer  *outboxpgx.Store
	ledger  *ledger.Ledger
	seed    uint64
	pause   time.Duration // of a writer between two transactions, at most
	full    atomic.Bool   // mostWaiting is reached
}

func newLoad(pool *pgxpool.Pool, l *ledger.Ledger, seed uint64, pause time.Duration) (*load, error) {
	manager, err1 := txretry.New(pool, txretry.Config{Logger: quiet})
	writer, err2 := outboxpgx.New(pool, outboxpgx.Config{PollOnly: true, MaxBodyBytes: maxBody + 1, Logger: quiet})
	return &load{pool: pool, manager: manager, writer: writer, ledger: l, seed: seed, pause: pause}, errors.Join(err1, err2)
}

// startLoad has writers at work on the store until stop is called.
func (s *store) startLoad(l *ledger.Ledger, rng *rand.Rand, pause time.Duration) (stop func()) {
	s.t.Helper()
	w, err := newLoad(s.pool, l, rng.Uint64(), pause)
	must(s.t, err)
	stopCount := beside(s.t, func(ctx context.Context) error {
		for runloop.Sleep(ctx, 200*time.Millisecond) == nil {
			w.count(ctx)
		}
		return nil
	})
	stopWriters := beside(s.t, w.run)
	return func() {
		stopWriters()
		stopCount()
	}
}

// count finds out whether mostWaiting is reached. A database that fails leaves what was known.
func (w *load) count(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	var n int
	err := w.pool.QueryRow(ctx, `SELECT count(*) FROM (SELECT FROM holdfast_outbox LIMIT $1) m`, mostWaiting).Scan(&n)
	if err == nil {
		w.full.Store(n == mostWaiting)
	}
}

// run commits and rolls back until ctx ends, and finishes what it has begun. A database that fails
// is no error: the writer does not know then what became of its transaction.
func (w *load) run(ctx context.Context) error {
	var running sync.WaitGroup
	for i := range writers {
		running.Go(func() {
			rng := rand.New(rand.NewPCG(w.seed, uint64(i)))
			for runloop.Sleep(ctx, time.Duration(rng.Int64N(int64(w.pause)))) == nil {
				if !w.full.Load() {
					w.transact(context.WithoutCancel(ctx), rng)
				}
			}
		})
	}
	running.Wait()
	return nil
}

// txPatience bounds a transaction whose database is gone.
const txPatience = 10 * time.Second

func (w *load) transact(ctx context.Context, rng *rand.Rand) {
	ctx, cancel := context.WithTimeout(ctx, txPatience)
	defer cancel()
	d := draw(rng)
	var err error
	if d.late > 0 {
		err = d.holdOpen(ctx, w)
	} else {
		err = w.manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error { return d.write(ctx, tx, w.writer) })
	}
	if committed := err == nil; committed || errors.Is(err, errOnPurpose) {
		w.ledger.Note(committed, d.ids)
	}
}

// deal is one transaction to be.
type deal struct {
	key      string
	ids      []uuid.UUID
	rollBack bool
	late     time.Duration // how long it stays open after it has taken its numbers
}

var errOnPurpose = errors.New("rolled back on purpose")

func draw(rng *rand.Rand) deal {
	var d deal
	if rng.IntN(4) > 0 {
		d.key = "key " + strconv.Itoa(rng.IntN(keys))
	}
	for range 1 + rng.IntN(maxPerTx) {
		d.ids = append(d.ids, ids.New())
	}
	d.rollBack = rng.IntN(8) == 0
	if rng.IntN(16) == 0 {
		d.late = time.Duration(20+rng.IntN(300)) * time.Millisecond
	}
	return d
}

// write does the business and writes its messages, which begin behind the last of the key.
func (d deal) write(ctx context.Context, tx pgx.Tx, writer *outboxpgx.Store) error {
	var last int64
	if d.key != "" {
		err := tx.QueryRow(ctx, `UPDATE counters SET n = n + $2 WHERE key = $1 RETURNING n`, d.key, len(d.ids)).Scan(&last)
		if err != nil {
			return err
		}
	}
	msgs, ns := make([]outbox.Message, len(d.ids)), make([]int64, len(d.ids))
	for i, id := range d.ids {
		if d.key != "" {
			ns[i] = last - int64(len(d.ids)-1-i)
		}
		msgs[i] = outbox.Message{ID: id, Name: name, Key: d.key, Body: fmt.Appendf(nil, `{"n":%d}`, ns[i])}
	}
	if _, err := tx.Exec(ctx, `INSERT INTO deeds SELECT unnest($1::uuid[]), $2, unnest($3::bigint[])`, d.ids, d.key, ns); err != nil {
		return err
	}
	if err := writer.Write(ctx, tx, msgs...); err != nil {
		return err
	}
	if d.rollBack {
		return errOnPurpose
	}
	return nil
}

// holdOpen writes at once, on a transaction that txretry does not manage, and ends it late.
func (d deal) holdOpen(ctx context.Context, w *load) error {
	return pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
		rollBack := d
		rollBack.rollBack = false
		if err := rollBack.write(ctx, tx, w.writer); err != nil {
			return err
		}
		if err := runloop.Sleep(ctx, d.late); err != nil {
			return err
		}
		if d.rollBack {
			return errOnPurpose
		}
		return nil
	})
}

// untilMore waits until n more messages have arrived.
func untilMore(t testing.TB, l *ledger.Ledger, n int) {
	t.Helper()
	before := l.Delivered()
	untilTrue(t, "messages arrive", func() bool { return l.Delivered() >= before+n })
}
