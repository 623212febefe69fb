package outboxpgx

import (
	"cmp"
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/isolate"
	"github.com/holdfast-go/holdfast/internal/sqlstate"
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

// release makes due rows ready. Where the server refuses that, it looks for the rows at fault by halves, and makes the others
// ready. Its error is then why one of the rows was refused.
func (s *Store) release(ctx context.Context) error {
	skip := s.refusedDue.skip()
	err := s.releaseSome(ctx, skip, nil)
	if !sqlstate.Refused(err) {
		return cmp.Or(err, s.refusedDue.err())
	}
	ids, err := s.dueRows(ctx, skip)
	if err != nil {
		return err
	}
	search := isolate.New(isolate.Halves, ids...)
	for group := search.Next(len(ids)); group != nil; group = search.Next(len(ids)) {
		err := s.releaseSome(ctx, skip, group)
		switch {
		case err == nil:
			search.Clear(group...)
		case !sqlstate.Refused(err):
			return err
		case search.Failed(group...):
			s.refusedDue.add(group[0], s.t.explain(err))
		}
	}
	return s.refusedDue.err()
}

// dueRows returns the ids that a release looks at.
func (s *Store) dueRows(ctx context.Context, skip uuids) (ids []pgtype.UUID, err error) {
	queue := &pgx.Batch{}
	queue.Queue(beginSQL)
	queue.Queue(settingsSQL)
	queue.Queue(s.sql.due, dueRows, skip, nil).Query(func(rows pgx.Rows) (err error) {
		ids, err = pgx.CollectRows(rows, pgx.RowTo[pgtype.UUID])
		return err
	})
	queue.Queue(commitSQL)
	return ids, s.send(ctx, queue)
}

// releaseSome makes due rows ready in a transaction of its own: all but some, or of some alone.
func (s *Store) releaseSome(ctx context.Context, skip, only uuids) error {
	return s.use(ctx, func(ctx context.Context, conn *pgxpool.Conn) error {
		return pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) error {
			return s.releaseIn(ctx, tx, skip, only)
		})
	})
}

func (s *Store) releaseIn(ctx context.Context, tx pgx.Tx, skip, only uuids) error {
	var lanes []int16
	queue := &pgx.Batch{}
	queue.Queue(settingsSQL)
	queue.Queue(asyncCommitSQL)
	queue.Queue(s.sql.lockDue, dueRows, skip, only).Query(func(rows pgx.Rows) (err error) {
		lanes, err = pgx.CollectRows(rows, pgx.RowTo[int16])
		return err
	})
	if err := tx.SendBatch(ctx, queue).Close(); err != nil || len(lanes) == 0 {
		return err
	}
	queue = &pgx.Batch{}
	queue.Queue(s.sql.holdDue, lanes, dueRows, skip, only)
	queue.Queue(s.sql.release, lanes, dueRows, releaseRows, keyRows, probeRows, followAfter.Microseconds(), skip, only)
	return tx.SendBatch(ctx, queue).Close()
}

// refusedDue are rows that are due and that the server does not let go. Each is left out of releases for a while.
type refusedDue struct {
	mu   sync.Mutex
	byID map[pgtype.UUID]refusedRow
}

type refusedRow struct {
	reason error
	tried  time.Time
}

// skip returns the rows to leave out, and forgets those whose time has come.
func (r *refusedDue) skip() uuids {
	r.mu.Lock()
	defer r.mu.Unlock()
	ids := uuids{}
	for id, row := range r.byID {
		if time.Since(row.tried) >= retryRefused {
			delete(r.byID, id)
			continue
		}
		ids = append(ids, id)
	}
	return ids
}

func (r *refusedDue) add(id pgtype.UUID, reason error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.byID == nil {
		r.byID = map[pgtype.UUID]refusedRow{}
	}
	r.byID[id] = refusedRow{reason, time.Now()}
}

// err names one of the rows, nil if there is none.
func (r *refusedDue) err() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, row := range r.byID {
		return fmt.Errorf("outboxpgx: %d messages that are due cannot be made ready; message %s: %w", len(r.byID), uuid.UUID(id.Bytes), row.reason)
	}
	return nil
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
