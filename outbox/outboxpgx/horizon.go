package outboxpgx

import (
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// horizon finds the upper limit for the floors of the lanes: the highest sequence number at or below which no
// new row can appear.
//
// A row can appear late, after claims have read higher numbers, if its transaction took the number long before
// its commit. Such a transaction holds a lock on the table, because an INSERT takes the lock before the number.
// The horizon therefore works in rounds:
//
//  1. A claim has read the numbers up to n (seen).
//  2. A settlement reads which transactions hold a lock on the table (question, answer).
//  3. When all of these have ended, no row can appear at or below n: n is safe.
//
// An example with the transactions A, B, C and D:
//
//	asked at   answer   still open   pending   safe
//	seen 97    A, B     A, B         97        0      97 waits for A and B
//	seen 101   B, C     B            97        0      A has ended
//	seen 104   C, D     C, D         104       97     A and B have ended: 97 is safe, 104 waits for C and D
//
// All of this is invalid if the sequence restarts at lower numbers. After TRUNCATE … RESTART IDENTITY, messages lie
// below the floors. The first scan that finds one starts a new era in all lanes; the other relays read the era of the
// lanes they claim. Until that scan, numbers that have grown past the floors are published before those below. A claim
// could compare the floors with the last number of the sequence, but that number may have passed them already, so the
// operation needs stopped relays (doc.go). A failover that lost numbers moves the floors back too. An era belongs to one start of the server, so
// a settlement on another server raises no floor. Logical replication copies the floors but not the sequence. A claim
// that finds a new era therefore releases its messages, and the next claim first scans below the floors.
type horizon struct {
	mu   sync.Mutex
	era  int64
	seen int64 // the highest number that a claim has read
	safe int64 // no row can appear at or below it

	pending int64    // becomes safe
	writers []string // when these transactions have ended

	count  int // number of questions
	asking int // the open question; 0: none. Only one is open at a time, so answers come in order
	asked  time.Time

	looked time.Time // the last scan below the floors
}

const (
	// askInterval is the time between two questions while askNumbers or more numbers are not known to be safe.
	// The floors lag behind by twice this time. With an old snapshot, claims walk over all rows published in that
	// time. At 120,000 messages per second, an interval of 50 ms costs them a fifth of their throughput, and 10
	// ms a twentieth.
	askInterval = 10 * time.Millisecond
	askNumbers  = 100
	// slowInterval is the interval while there are fewer numbers, to avoid a question per message.
	slowInterval = time.Second
)

// lookInterval is the time between two scans below the floors. Rows lie there only if somebody changed the tables by
// hand or restored one without the other.
const lookInterval = 5 * time.Second

// saw records the highest number that a claim has read, and the era of its lanes. It reports whether the era is new.
// Then the claim may not have read the first rows, so the next claim scans below the floors.
func (h *horizon) saw(era, seq int64) (changed bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if era != h.era {
		changed = h.era != 0
		h.reset()
		h.era, h.looked = era, time.Time{}
	}
	h.seen = max(h.seen, seq)
	return changed
}

// below reports whether a scan below the floors is due.
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

// question has the highest number read when the question was sent. number 0 means that no question is due.
type question struct {
	number int
	seen   int64
}

func (h *horizon) question() question {
	h.mu.Lock()
	defer h.mu.Unlock()
	now, interval := time.Now(), askInterval
	if h.seen < h.safe+askNumbers {
		interval = slowInterval
	}
	if h.asking != 0 || h.seen <= h.safe || now.Sub(h.asked) < interval {
		return question{}
	}
	h.count++
	h.asking, h.asked = h.count, now
	return question{h.count, h.seen}
}

// answer records the transactions that hold a lock on the table.
func (h *horizon) answer(q question, writers []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if q.number == 0 || q.number != h.asking { // it may belong to an earlier era
		return
	}
	h.asking = 0
	h.writers = slices.DeleteFunc(h.writers, func(w string) bool { return !slices.Contains(writers, w) })
	if len(h.writers) == 0 {
		h.safe = h.pending
		h.pending, h.writers = q.seen, writers
	}
}

// limit returns the upper limit of all floors, and the era in which it is valid.
func (h *horizon) limit() (seq, era int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.safe + 1, h.era
}

// forget resets the horizon after a database error, because the next database may be another one with lower
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

// lower scans below the floors, in a separate transaction. It calls looked after the scan has succeeded.
func (s *Store) lower(queue *pgx.Batch, looked func()) {
	queue.Queue(beginSQL)
	queue.Queue(settingsSQL)
	queue.Queue(asyncCommitSQL)
	queue.Queue(lookTimeoutSQL)
	queue.Queue(s.sql.lower).Exec(func(pgconn.CommandTag) error {
		looked()
		return nil
	})
	queue.Queue(commitSQL)
}

// lowerSQL lowers the floors to ready rows below them. Normally there are none. If there is one, the sequence has
// restarted at lower numbers, and all lanes get a new era. No floor is reliable then: the next rows of a lane may lie
// below its floor, and later rows above it.
const lowerSQL = `
WITH low AS MATERIALIZED (
  SELECT l.lane, (SELECT o.seq FROM {outbox} o WHERE o.lane = l.lane AND o.seq < l.floor AND {ready}
                  ORDER BY o.seq LIMIT 1) AS seq
  FROM {lanes} l),
locked AS MATERIALIZED (SELECT l.lane FROM {lanes} l WHERE EXISTS (SELECT FROM low WHERE seq IS NOT NULL) ORDER BY l.lane FOR UPDATE OF l),
lowered AS (
  UPDATE {lanes} l SET floor = least(l.floor, coalesce(low.seq, 0)), era = (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)
  FROM locked JOIN low ON low.lane = locked.lane WHERE l.lane = locked.lane RETURNING 1)
SELECT CASE WHEN locked > lowered THEN {ignored}({lanesName}, locked - lowered) END
FROM (SELECT (SELECT count(*) FROM locked) AS locked, (SELECT count(*) FROM lowered) AS lowered) n`

// writersSQL returns the transactions that may still insert a row with a lower number than claims have read: see
// horizon. $1 table.
const writersSQL = `
SELECT virtualtransaction FROM pg_locks
WHERE locktype = 'relation' AND relation = $1::text::regclass AND mode = 'RowExclusiveLock' AND granted
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND pid IS DISTINCT FROM pg_backend_pid()`
