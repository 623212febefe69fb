package ledger

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
)

// Keys is how many ordering keys a Writer uses.
const Keys = 50

const (
	// writers is how many transactions are open at once.
	writers = 3
	// maxPerTx is how many messages a transaction writes at most.
	maxPerTx = 10
	// mostWaiting is how many messages wait in the outbox when the writers stop for a while: a machine
	// that relays more slowly than they write would never be done otherwise.
	mostWaiting = 5000
	// txPatience bounds a transaction whose database is gone.
	txPatience = 10 * time.Second
)

// KeyOf is the ordering key of that number, from 0 to Keys-1.
func KeyOf(i int) string { return "key " + strconv.Itoa(i) }

// counters are locked by who writes messages of a key, and count those that committed.
const tablesSQL = `
CREATE TABLE counters (key text PRIMARY KEY, n bigint NOT NULL DEFAULT 0);
CREATE TABLE deeds (id uuid PRIMARY KEY, key text NOT NULL, n bigint NOT NULL);`

// Migrate makes the tables of the business beside an outbox.
func Migrate(ctx context.Context, pool *pgxpool.Pool) error {
	if _, err := pool.Exec(ctx, tablesSQL); err != nil {
		return err
	}
	_, err := pool.Exec(ctx, "INSERT INTO counters SELECT 'key ' || k FROM generate_series(0, $1::int - 1) k", Keys)
	return err
}

// Deeds are what has committed, by the word of the database.
func Deeds(ctx context.Context, pool *pgxpool.Pool) ([]Deed, error) {
	rows, _ := pool.Query(ctx, "SELECT id, key, n FROM deeds") // CollectRows returns its error
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (d Deed, err error) {
		return d, row.Scan(&d.ID, &d.Key, &d.N)
	})
}

// Writer is a business at work: it commits messages of many keys and of none, or rolls them back, some late, and notes
// in a ledger what it was told.
type Writer struct {
	pool    *pgxpool.Pool
	manager *txretry.Manager
	store   *outboxpgx.Store
	ledger  *Ledger
	name    string
	seed    uint64
	pause   time.Duration
	full    atomic.Bool // mostWaiting is reached
}

// NewWriter returns a writer of messages of that name, on a database with Migrate's tables. Pause is that between two
// transactions of one of its goroutines, at most. The seed chooses what it does.
func NewWriter(pool *pgxpool.Pool, store *outboxpgx.Store, l *Ledger, name string, seed uint64, pause time.Duration) (*Writer, error) {
	manager, err := txretry.New(pool, txretry.Config{Logger: slog.New(slog.DiscardHandler)})
	return &Writer{pool: pool, manager: manager, store: store, ledger: l, name: name, seed: seed, pause: pause}, err
}

// Run commits and rolls back until ctx ends, finishes what it has begun, and returns nil. A database that fails is no
// error: the writer does not know then what became of its transaction.
func (w *Writer) Run(ctx context.Context) error {
	var running sync.WaitGroup
	running.Go(func() { w.count(ctx) })
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

// count finds out, again and again, whether mostWaiting is reached. A database that fails leaves what was known.
func (w *Writer) count(ctx context.Context) {
	for runloop.Sleep(ctx, 200*time.Millisecond) == nil {
		attempt, cancel := context.WithTimeout(ctx, time.Second)
		var n int
		err := w.pool.QueryRow(attempt, "SELECT count(*) FROM (SELECT FROM holdfast_outbox LIMIT $1) m", mostWaiting).Scan(&n)
		cancel()
		if err == nil {
			w.full.Store(n == mostWaiting)
		}
	}
}

// deal is one transaction to be.
type deal struct {
	key      string
	msgs     []outbox.Message
	rollBack bool
	late     time.Duration // how long it stays open after it has taken its numbers
}

var errOnPurpose = errors.New("rolled back on purpose")

func (w *Writer) draw(rng *rand.Rand) deal {
	var d deal
	if rng.IntN(4) > 0 {
		d.key = KeyOf(rng.IntN(Keys))
	}
	for range 1 + rng.IntN(maxPerTx) {
		d.msgs = append(d.msgs, outbox.Message{ID: ids.New(), Body: []byte(`{}`)})
	}
	d.rollBack = rng.IntN(8) == 0
	if rng.IntN(16) == 0 {
		d.late = time.Duration(20+rng.IntN(300)) * time.Millisecond
	}
	return d
}

func (w *Writer) transact(ctx context.Context, rng *rand.Rand) {
	ctx, cancel := context.WithTimeout(ctx, txPatience)
	defer cancel()
	d := w.draw(rng)
	work := func(ctx context.Context, tx pgx.Tx) error {
		if err := w.Write(ctx, tx, d.key, d.msgs...); err != nil {
			return err
		}
		err := runloop.Sleep(ctx, d.late)
		if err == nil && d.rollBack {
			err = errOnPurpose
		}
		return err
	}
	var err error
	if d.late > 0 { // then txretry does not manage the transaction, and its messages are written at once
		err = pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error { return work(ctx, tx) })
	} else {
		err = w.manager.Do(ctx, work)
	}
	if committed := err == nil; committed || errors.Is(err, errOnPurpose) {
		w.ledger.Note(committed, idsOf(d.msgs))
	}
}

// Write does the business of a transaction: it writes messages, which have their ids, into the outbox. Their places
// are those behind the last of the key; "" is none.
func (w *Writer) Write(ctx context.Context, tx pgx.Tx, key string, msgs ...outbox.Message) error {
	var last int64
	if key != "" {
		err := tx.QueryRow(ctx, "UPDATE counters SET n = n + $2 WHERE key = $1 RETURNING n", key, len(msgs)).Scan(&last)
		if err != nil {
			return err
		}
	}
	ns := make([]int64, len(msgs))
	for i := range msgs {
		msgs[i].Name, msgs[i].Key = w.name, key
		if key != "" {
			ns[i] = last - int64(len(msgs)-1-i)
		}
	}
	if _, err := tx.Exec(ctx, "INSERT INTO deeds SELECT unnest($1::uuid[]), $2, unnest($3::bigint[])", idsOf(msgs), key, ns); err != nil {
		return err
	}
	return w.store.Write(ctx, tx, msgs...)
}

func idsOf(msgs []outbox.Message) []uuid.UUID {
	all := make([]uuid.UUID, len(msgs))
	for i, m := range msgs {
		all[i] = m.ID
	}
	return all
}
