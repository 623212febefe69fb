package outboxpgx

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/internal/sqlstate"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// Claim implements driver.Source. Of the messages it writes only those that are held or released: see
// waiting.go. A claim that finds nothing releases what has become due meanwhile, and looks once more.
func (s *Store) Claim(ctx context.Context, req driver.Claim) (driver.Batch, error) {
	if req.Limit < 1 || req.Lease < time.Microsecond {
		return driver.Batch{}, fmt.Errorf("outboxpgx: claim of %d messages for %v", req.Limit, req.Lease)
	}
	if req.Skip == nil {
		req.Skip = []string{}
	}
	c := claim{req: req}
	err := s.forgetGone(ctx)
	if err == nil {
		err = s.claimOrRelease(ctx, &c)
	}
	if err == nil && len(c.batch.Leases) == 0 {
		err = s.checkHidden(ctx)
	}
	if err != nil {
		s.horizon.forget()
		return driver.Batch{}, fmt.Errorf("outboxpgx: claim: %w", s.t.explain(err))
	}
	if c.refused != nil {
		s.complain(ctx, "outboxpgx: messages that wait cannot be changed", slog.Any("error", c.refused))
	}
	if rest := s.refusals.rest(!c.aside || len(c.batch.Leases) > 0); rest || c.refused != nil {
		c.batch.More = c.batch.More && len(c.batch.Leases) > 0
		c.batch.Due = refusedDelay
	}
	c.batch.Refused = errors.Join(s.refusals.err(), s.t.explain(c.refused), s.hidden.err())
	return c.batch, nil
}

// claimOrRelease claims, and releases what is due. What is due may be beyond us, and must not keep what is ready.
func (s *Store) claimOrRelease(ctx context.Context, c *claim) error {
	if s.nextDue.passed() {
		c.refused = s.release(ctx)
	}
	err := s.take(ctx, c)
	if err == nil && c.refused == nil && len(c.batch.Leases) == 0 && !c.batch.More && s.nextDue.passed() {
		c.refused = s.release(ctx)
		err = s.take(ctx, c)
	}
	return err
}

// claim is what one claim asks for and has read.
type claim struct {
	req   driver.Claim
	token int64

	batch  driver.Batch
	era    int64 // of the lanes
	seen   int64 // the highest sequence number
	looked bool  // below the floors, right before
	single bool  // a lane under suspicion gives one message at a time
	behind bool  // ready rows were met behind a waiting one of their key
	aside  bool  // ready rows were met whose outcomes were refused
	store  *Store
	due    *int64 // microseconds until the first waiting row is due; 0 or less: it is; nil: none waits
	ends   *int64 // microseconds until the first lease of another claim ends; nil: there is none

	ignored int64 // leases that the table ignored
	refused error // why rows that wait could not be held or released
}

// overdueDelay is when to ask again for rows that are due and whose lanes are busy.
const overdueDelay = 10 * time.Millisecond

// take leases lanes and reads their messages. If its end is not known, the next claim gives the lanes back.
func (s *Store) take(ctx context.Context, c *claim) error {
	*c = claim{req: c.req, token: newToken(), store: s, refused: c.refused}
	begin := time.Now()
	err := s.sendClaim(ctx, c)
	if err == nil && c.ignored > 0 {
		err = pgcall.Ignored(s.t.lanes, fmt.Sprintf("the lease of %d lanes", c.ignored))
	}
	s.slow.took(time.Since(begin))
	if err == nil && len(c.batch.Leases) > 0 && s.horizon.saw(c.era, c.seen) && !c.looked {
		c.batch.Messages, c.batch.Unreadable = nil, nil // given back
	}
	if err == nil && c.behind {
		if err = s.hold(ctx, c.batch, c.req.Skip); sqlstate.Refused(err) {
			c.refused, err = err, nil
		}
	}
	if err == nil && len(c.batch.Leases) > 0 && len(c.batch.Messages) == 0 {
		_, err = s.Settle(ctx, c.batch, nil)
		c.batch.Leases, c.batch.More, c.single = nil, true, false
	}
	if err == nil && c.single {
		c.batch.Unsettled, err = s.countLosses(ctx, c)
	}
	if err != nil {
		s.lost.add(c.token, c.req.Lease)
		return err
	}
	s.expect(c)
	return nil
}

// expect notes when there is something to do again.
func (s *Store) expect(c *claim) {
	var next time.Time
	if c.due != nil {
		due := time.Duration(*c.due) * time.Microsecond
		next = time.Now().Add(due)
		c.batch.Due = due
		if due <= 0 {
			c.batch.Due = overdueDelay
		}
	}
	s.nextDue.set(next)
	if c.ends != nil {
		ends := time.Duration(*c.ends) * time.Microsecond
		if c.batch.Due == 0 || ends < c.batch.Due {
			c.batch.Due = ends
		}
	}
}

// sendClaim sends a claim, with a look below the floors before it when it is time for one. The look ends early where an
// old snapshot keeps very many entries of rows long gone, since sparing claims these entries is what the floors are
// there for. The claim is then sent again without it.
func (s *Store) sendClaim(ctx context.Context, c *claim) error {
	queue := &pgx.Batch{}
	looking := s.horizon.below()
	if looking {
		s.lower(queue, func() { looking, c.looked = false, true })
	}
	s.claim(queue, c)
	return s.use(ctx, func(ctx context.Context, conn *pgxpool.Conn) error {
		err := conn.SendBatch(ctx, queue).Close()
		if canceled, ok := errors.AsType[*pgconn.PgError](err); !ok || !looking || canceled.Code != queryCanceled {
			return err
		}
		if _, err := conn.Exec(ctx, "ROLLBACK"); err != nil {
			return err
		}
		queue = &pgx.Batch{}
		s.claim(queue, c)
		return conn.SendBatch(ctx, queue).Close()
	})
}

func (s *Store) claim(queue *pgx.Batch, c *claim) {
	queue.Queue(beginSQL)
	queue.Queue(s.sql.claim, c.token, c.req.Lease.Microseconds(), s.lanesPerClaim, c.req.Skip, c.req.Limit, c.req.Alone, s.lost.tokens()).Query(func(rows pgx.Rows) error {
		err := c.leases(rows)
		c.batch.More = len(c.batch.Leases) == s.lanesPerClaim
		return err
	})
	read := s.sql.read
	if s.slow.lately() {
		read = s.sql.readRuns
	}
	queue.Queue(read, c.token, c.req.Limit, c.req.Skip, s.maxBatchBytes).Query(c.messages)
	queue.Queue(commitSQL)
}

// leases reads the lanes that were leased, and the last row, which has none.
func (c *claim) leases(rows pgx.Rows) error {
	var lane *int
	var single, doubtful bool
	var era int64
	_, err := pgx.ForEachRow(rows, []any{&lane, &single, &doubtful, &era, &c.due, &c.ends, &c.ignored}, func() error {
		c.batch.Suspect = c.batch.Suspect || doubtful
		if lane != nil {
			c.era = era
			c.single = c.single || single
			c.batch.Leases = append(c.batch.Leases, driver.Lease{Lane: *lane, Token: c.token})
		}
		return nil
	})
	return err
}

func (c *claim) messages(rows pgx.Rows) error {
	var r record
	var seq int64
	var behind, locked bool
	stuck := stuckKeys{}
	_, err := pgx.ForEachRow(rows, r.dest(&seq, &behind, &locked), func() error {
		c.seen = max(c.seen, seq)
		c.behind = c.behind || behind
		if outcome, known := c.store.refusals.of(r.id); known {
			c.aside = true
			stuck.leaveOut(r.key.String, outcome.Verdict != driver.Published)
			return nil
		}
		if stuck.leaveOut(r.key.String, behind || locked) {
			return nil
		}
		m, err := r.message()
		if err != nil {
			c.unreadable(err)
		}
		c.batch.Messages = append(c.batch.Messages, m)
		return nil
	})
	return err
}

// unreadable notes that the next message could not be decoded.
func (c *claim) unreadable(err error) {
	if c.batch.Unreadable == nil {
		c.batch.Unreadable = map[int]error{}
	}
	c.batch.Unreadable[len(c.batch.Messages)] = err
}

// countLosses returns how many claims of this one message alone were lost.
func (s *Store) countLosses(ctx context.Context, c *claim) (losses int, err error) {
	err = s.use(ctx, func(ctx context.Context, conn *pgxpool.Conn) error {
		return conn.QueryRow(ctx, s.sql.countLosses, c.token, c.seen).Scan(&losses)
	})
	return losses, err
}

// slowClaims notes when a claim was slow, as it is for the reason that runsSQL has.
type slowClaims struct {
	mu   sync.Mutex
	last time.Time
}

const (
	slowClaim = time.Second // a relay gives a claim up after 5 s
	slowFor   = time.Minute
)

func (s *slowClaims) took(d time.Duration) {
	if d < slowClaim {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last = time.Now()
}

func (s *slowClaims) lately() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Since(s.last) < slowFor
}

// newToken returns a number that no other claim has, in any process at any time.
func newToken() int64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // it never fails
	return int64(binary.BigEndian.Uint64(b[:]))
}

// lostClaims are the claims of this Store whose end is not known. They may hold lanes and publish nothing.
// Each is remembered until its lease is over, since its COMMIT may still be on its way.
type lostClaims struct {
	mu   sync.Mutex
	list []lostClaim
}

type lostClaim struct {
	token int64
	until time.Time
}

// maxLost is more than there are lanes: of so many claims only a few can hold any.
const maxLost = 64

func (l *lostClaims) add(token int64, lease time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list = append(l.list, lostClaim{token, time.Now().Add(lease)})
	l.list = l.list[max(0, len(l.list)-maxLost):]
}

func (l *lostClaims) tokens() []int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	l.list = slices.DeleteFunc(l.list, func(c lostClaim) bool { return now.After(c.until) })
	tokens := []int64{}
	for _, c := range l.list {
		tokens = append(tokens, c.token)
	}
	return tokens
}
