package outboxpgx

import (
	"context"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/outbox/driver"
)

// How messages wait. A row is ready (no due_at) or waiting (a due_at). A waiting row holds back the later
// rows of its key, which pass through these states:
//
//   - ready: a claim finds them and leaves them out. Order needs nothing more.
//   - held: the claim that met them gives them a far due_at. They leave the index that claims walk, so
//     each is paid for once.
//   - ready again: when the first waiting row of the key is released, some of those held behind it come
//     along. The one after them gets a near due_at of its own, so that it follows soon.
//
// The invariant: of the waiting rows of a key, the first has a due time of its own. Holding and releasing
// keep it by locking the lanes first and looking at their rows after that.

const (
	// dueRows is how many due rows one transaction looks at.
	dueRows = 500
	// releaseRows is how many held rows one transaction releases at most. keyRows is how many of one key:
	// more than can be published until the next ones follow, and few enough to be held again.
	releaseRows, keyRows = 5000, 500
	// probeRows is how many held rows come along with a row that may fail again.
	probeRows = 10
	// followAfter is the time until the next portion of a key follows.
	followAfter = 100 * time.Millisecond
	// holdRows is how many rows of a lane one transaction looks at to hold them.
	holdRows = 1000
)

// nextDue is when the first waiting row is due, as the last claim has seen it.
type nextDue struct {
	mu sync.Mutex
	at time.Time // zero: none waits
}

func (n *nextDue) set(at time.Time) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.at = at
}

// passed reports whether a row is due.
func (n *nextDue) passed() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return !n.at.IsZero() && !time.Now().Before(n.at)
}

// release makes due rows ready, in a transaction of its own.
func (s *Store) release(ctx context.Context) error {
	return s.use(ctx, func(ctx context.Context, conn *pgxpool.Conn) error {
		return pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) error {
			return s.releaseIn(ctx, tx)
		})
	})
}

func (s *Store) releaseIn(ctx context.Context, tx pgx.Tx) error {
	var lanes []int16
	queue := &pgx.Batch{}
	queue.Queue(settingsSQL)
	queue.Queue(asyncCommitSQL)
	queue.Queue(s.sql.lockDue, dueRows).Query(func(rows pgx.Rows) (err error) {
		lanes, err = pgx.CollectRows(rows, pgx.RowTo[int16])
		return err
	})
	if err := tx.SendBatch(ctx, queue).Close(); err != nil || len(lanes) == 0 {
		return err
	}
	queue = &pgx.Batch{}
	queue.Queue(s.sql.holdDue, lanes, dueRows)
	queue.Queue(s.sql.release, lanes, dueRows, releaseRows, keyRows, probeRows, followAfter.Microseconds())
	return tx.SendBatch(ctx, queue).Close()
}

// hold takes the rows out of the way that a claim met behind a waiting one.
func (s *Store) hold(ctx context.Context, b driver.Batch, skip []string) error {
	lanes, tokens := columnsOfLeases(b.Leases)
	queue := &pgx.Batch{}
	queue.Queue(beginSQL)
	queue.Queue(settingsSQL)
	queue.Queue(asyncCommitSQL)
	queue.Queue(s.sql.lock, lanes, tokens)
	queue.Queue(s.sql.holdReady, tokens[0], holdRows, skip)
	queue.Queue(commitSQL)
	return s.send(ctx, queue)
}
