package outboxpgx

import (
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// horizon finds the highest sequence number that the floors of the lanes may rise to: the one at or below
// which no row can appear any more.
//
// A row that appears late has a number that others have passed already, because its transaction took the
// number long before it commits. Such a transaction holds a lock on the table, since an INSERT takes the
// lock before the number. So the horizon works in rounds:
//
//  1. A claim has read the numbers up to n (seen).
//  2. A settlement asks which transactions hold a lock on the table (question, answer).
//  3. When all of these have ended, nothing can appear at or below n: it is safe.
//
// An example with the transactions A, B, C and D:
//
//	asked at   answer   still open   pending   safe
//	seen 97    A, B     A, B         97        0      97 waits for A and B
//	seen 101   B, C     B            97        0      A has ended
//	seen 104   C, D     C, D         104       97     A and B have ended: 97 is safe, 104 waits for C and D
//
// All of that is void when the numbers begin anew. TRUNCATE … RESTART IDENTITY leaves messages below the
// floors: the first look that finds one begins a new era in all lanes, and the other relays learn of it from
// the era of the lanes they claim. A failover that lost numbers takes the floors back with them: an era is that
// of one start of the server, and a settlement elsewhere raises no floor. Logical replication brings the floors and
// not the numbers: so the first messages that a claim finds in another era are given back, and it looks below the floors first.
type horizon struct {
	mu   sync.Mutex
	era  int64
	seen int64 // the highest number that a claim has read
	safe int64 // no row can appear at or below it

	pending int64    // becomes safe
	writers []string // when these transactions have ended

	count  int // of questions
	asking int // the question that is open, 0: none. There is one at a time, so answers come in order
	asked  time.Time

	looked time.Time // below the floors
}

const (
	// askInterval is the time between two questions while askNumbers or more are not known to be safe. The floors lag
	// behind by twice this. Under an old snapshot claims walk over all that was published in that time: at
	// 120,000 messages per second an interval of 50 ms costs them a fifth of their rate, and one of 10 ms a twentieth.
	askInterval = 10 * time.Millisecond
	askNumbers  = 100
	// slowInterval is the time while there are fewer: they are not worth a question with each message.
	slowInterval = time.Second
)

// lookInterval is the time between two looks below the floors. Nothing lies there, unless somebody
// changed the tables by hand or restored one without the other.
const lookInterval = 5 * time.Second

// saw notes the highest number that a claim has read, and the era of its lanes. It reports whether that is another one than
// before: what the claim has read may not be the first then, so the next claim looks below the floors.
func (h *horizon) saw(era, seq int64) (anew bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if era != h.era {
		anew = h.era != 0
		h.reset()
		h.era, h.looked = era, time.Time{}
	}
	h.seen = max(h.seen, seq)
	return anew
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

// question remembers what had been read when the transactions were asked for. number 0: nothing is asked.
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

// answer takes the transactions that hold a lock on the table.
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

// limit returns the number that no floor may be above, and the era in which that holds.
func (h *horizon) limit() (seq, era int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.safe + 1, h.era
}

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

// lower looks below the floors, in a transaction of its own. It calls looked when that look was answered.
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

// lowerSQL lowers the floors to ready rows that lie below them. None should. One that does shows that
// sequence numbers have begun anew, so all lanes get a new era. No floor is believed any more: what a lane gets next may lie
// below its floor, and what it gets later above.
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

// writersSQL returns the transactions that may yet insert a row whose number was passed already: see horizon.
// $1 table.
const writersSQL = `
SELECT virtualtransaction FROM pg_locks
WHERE locktype = 'relation' AND relation = $1::text::regclass AND mode = 'RowExclusiveLock' AND granted
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND pid IS DISTINCT FROM pg_backend_pid()`
