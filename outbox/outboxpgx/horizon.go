package outboxpgx

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// horizon finds out up to which sequence number no transaction is open any more, so that the floors
// of the lanes may rise to there. A row that is not yet committed has a sequence number at or below
// one that was seen only if its transaction holds a lock on the table: an INSERT takes the lock
// before the number. So the horizon asks who holds such locks; when all of these have ended, nothing
// can appear at or below what was seen before it asked.
//
// What it knows is void when the numbers begin anew, by TRUNCATE … RESTART IDENTITY or a failover that
// lost some: messages lie below the floors then. The first look that finds one there begins a new era
// in all lanes, by which every relay learns of it.
type horizon struct {
	mu     sync.Mutex
	era    int64
	seen   int64 // the highest number that was read
	safe   int64 // nothing new appears at or below it
	asking int   // the question that is open; 0: none. One at a time: answers must come in order
	asked  time.Time
	count  int // of questions

	pending int64    // becomes safe
	writers []string // when these have ended

	looked time.Time // below the floors
}

// askInterval is the time between two questions. The floors lag twice as far behind, and under an old
// snapshot claims walk over all that was published in that time: at 120,000 messages per second, 50 ms
// cost them a fifth of their pace, and 10 ms a twentieth.
const askInterval = 10 * time.Millisecond

// lookInterval is the time between two looks below the floors. Nothing lies there, unless somebody
// changed the tables by hand or restored one without the other.
const lookInterval = 5 * time.Second

// saw takes the highest number that a claim has read, in an era.
func (h *horizon) saw(era, seq int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if era != h.era {
		h.reset()
		h.era = era
	}
	h.seen = max(h.seen, seq)
}

// below reports whether it is time to look below the floors.
func (h *horizon) below() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := time.Now()
	if !h.looked.IsZero() && now.Sub(h.looked) < lookInterval {
		return false
	}
	h.looked = now
	return true
}

// question has what had been read when it was asked who writes. number 0: nothing is asked.
type question struct {
	number int
	seen   int64
}

func (h *horizon) question() question {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := time.Now()
	if h.asking != 0 || h.seen <= h.safe || now.Sub(h.asked) < askInterval {
		return question{}
	}
	h.count++
	h.asking, h.asked = h.count, now
	return question{h.count, h.seen}
}

// answer takes who writes.
func (h *horizon) answer(q question, writers []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if q.number == 0 || q.number != h.asking { // it may be of an era that is over
		return
	}
	h.asking = 0
	h.writers = slices.DeleteFunc(h.writers, func(w string) bool { return !slices.Contains(writers, w) })
	if len(h.writers) == 0 {
		h.safe = h.pending
		h.pending, h.writers = q.seen, writers
	}
}

// lower looks below the floors, in a transaction of its own. The look ends early where the entries of
// rows long gone are very many, which an old snapshot keeps: these are what the floors are there for.
func (s *Store) lower(ctx context.Context) error {
	queue := &pgx.Batch{}
	queue.Queue(beginSQL)
	queue.Queue(s.sql.setup)
	queue.Queue(s.sql.hurry)
	queue.Queue(briefSQL)
	queue.Queue(s.sql.lower)
	queue.Queue(commitSQL)
	return s.use(ctx, func(ctx context.Context, conn *pgxpool.Conn) error {
		err := conn.SendBatch(ctx, queue).Close()
		if canceled, ok := errors.AsType[*pgconn.PgError](err); ok && canceled.Code == queryCanceled {
			_, err = conn.Exec(ctx, "ROLLBACK") // so that the pool keeps the connection
		}
		return err
	})
}

const queryCanceled = "57014"

// forget is called when the database has failed: it may be another one afterwards, with lower
// numbers.
func (h *horizon) forget() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.reset()
	h.looked = time.Time{}
}

func (h *horizon) reset() {
	h.seen, h.safe, h.pending, h.writers, h.asking = 0, 0, 0, nil, 0
}

// limit is the number that no floor may be above, in an era.
func (h *horizon) limit() (seq, era int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.safe + 1, h.era
}
