package outboxpgx

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/internal/sqlstate"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// How a claim works:
//
//	Claim
//	├─ forgetGone      forget refused outcomes of messages that are no longer ready (settle.go)
//	├─ release         if a waiting message is due (waiting.go)
//	├─ take            one round trip:
//	│    lower           every 5 s: look below the floors (horizon.go)
//	│    claimSQL        end the leases of lost claims, lease free lanes
//	│    readSQL         read the ready messages of these lanes, in stored order
//	│    COMMIT          without waiting for the disk
//	│                  more only if needed:
//	│    hold            set messages aside that are behind a waiting one of their key (waiting.go)
//	│    Settle          release the lanes if the batch has no message
//	│    countLosses     if a lane under suspicion returned a single message
//	├─ release, take   again, if nothing was ready and a waiting message has become due
//	└─ checkHidden     if nothing was ready, every 30 s at most (check.go)
//
// A message that was read is left out of the batch in three cases: another session has locked its row, its outcome
// was refused, or it is behind a waiting message of its key. Later messages of its key are left out too, unless the
// refused outcome is that it was published.
//
// A claim whose COMMIT was not answered may have leased lanes. The next claim sends its token (lostClaims), and the
// server ends these leases. A lane has one token at a time, so a settlement with an older token changes nothing.

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

// A session may lock a message for as long as it likes: somebody has changed it by hand and not committed, or a row of
// another table refers to it. The message is left alone then, and the later ones of its key with it, since they must not
// overtake it. See free in store.go.

// stuckKeys are those of which a message was left alone.
type stuckKeys map[string]bool

// leaveOut reports whether to leave out a message too, since it is locked or behind one that is. Messages must come in
// their order.
func (s stuckKeys) leaveOut(key string, locked bool) bool {
	if locked && key != "" {
		s[key] = true
	}
	return locked || s[key]
}

// Other programs write to the table too. A row of theirs that is no message must not keep the others
// from being read: every column is scanned as something that cannot fail, and decoded by itself.

// record is a row of the columns of recordColumns. The id is scanned as bytes: of a uuid.UUID the
// client makes a text first.
type record struct {
	id                              [16]byte
	name, contentType               string
	body                            []byte
	headers                         []byte
	key                             pgtype.Text
	transport, exchange, routingKey string
	routeHeaders                    []byte
	createdAt                       pgtype.Timestamptz
	attempts                        int
	size                            int64 // of the body
	whole                           bool
}

// dest are the destinations of recordColumns, and of more behind them.
func (r *record) dest(more ...any) []any {
	return append([]any{
		&r.id, &r.name, &r.contentType, &r.body, &r.headers, &r.key, &r.transport, &r.exchange, &r.routingKey, &r.routeHeaders,
		&r.createdAt, &r.attempts, &r.size, &r.whole,
	}, more...)
}

// message decodes the record. With an error the message has what could be decoded.
func (r *record) message() (driver.Message, error) {
	m := driver.Message{
		ID: r.id, Name: r.name, ContentType: r.contentType, Body: r.body, Key: r.key.String, Transport: r.transport,
		Exchange: r.exchange, RoutingKey: r.routingKey,
		CreatedAt: r.createdAt.Time, Attempts: max(0, r.attempts),
	}
	var err1, err2, err3, err4 error
	if !r.whole {
		err4 = fmt.Errorf("too large to be read: a body of %d bytes, or more than 64 KiB beside it", r.size)
	}
	m.Headers, err1 = decodeHeaders("headers", r.headers)
	m.RouteHeaders, err2 = decodeHeaders("route_headers", r.routeHeaders)
	if r.createdAt.InfinityModifier != pgtype.Finite {
		err3 = errors.New("created_at is infinite")
	}
	return m, errors.Join(err1, err2, err3, err4)
}

// decodeHeaders takes [] for no headers: PHP writes an empty map like that.
func decodeHeaders(column string, text []byte) (map[string]string, error) {
	if len(text) == 0 || string(text) == "[]" {
		return nil, nil
	}
	var headers map[string]string
	if err := json.Unmarshal(text, &headers); err != nil {
		return nil, fmt.Errorf("%s is not a JSON object of strings: %w", column, err)
	}
	return headers, nil
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

// recordColumns are what a record is scanned from: texts where the row has texts, and a body where it
// is whole.
const recordColumns = `id, CASE WHEN texts THEN name ELSE left(name, 128) END, CASE WHEN texts THEN content_type ELSE '' END, CASE WHEN whole THEN body END,
  CASE WHEN texts THEN headers END, CASE WHEN texts THEN ordering_key END, CASE WHEN texts THEN transport_name ELSE '' END,
  CASE WHEN texts THEN exchange ELSE '' END, CASE WHEN texts THEN routing_key ELSE '' END, CASE WHEN texts THEN route_headers END,
  created_at, attempts, octet_length(body), whole`

// fits bounds what is read of a row o: its texts and headers as they are stored. A message that
// outbox.Prepare takes has less.
const fits = `octet_length(o.body) <= {max} AND octet_length(o.name) + octet_length(o.content_type) + octet_length(o.transport_name) + octet_length(o.exchange)
  + octet_length(o.routing_key) + coalesce(octet_length(o.ordering_key), 0) + coalesce(pg_column_size(o.headers), 0) + coalesce(pg_column_size(o.route_headers), 0) <= 65536`

// claimSQL leases lanes: see migrations/0006_outbox_relay.sql. $1 token, $2 microseconds of the lease, $3 lanes, $4
// transports to skip, $5 limit, $6 whether the relay has no other batch in hand, $7 tokens of lost claims.
const claimSQL = `
SELECT lane, single, doubtful, era, due_us, ends_us, dropped
FROM {claim}($1::bigint, $2::bigint, $3::integer, $4::text[], $5::integer, $6::boolean, $7::bigint[])`

// readSQL reads the rows of the lanes just leased: of each lane its share of the limit, in order, until the
// bodies exceed the bytes. Rows behind a waiting one of their key, those that another session has locked, and rows too large
// by themselves come without a body. It follows claimSQL, under its settings: its snapshot must be newer than the lock on the
// lane. $1 token, $2 limit, $3 transports to skip, $4 bytes.
const readSQL = `
SELECT {record}, seq, behind, locked
FROM (
  SELECT m.*, fits AS texts, fits AND NOT behind AND NOT locked AS whole,
    sum(octet_length(m.body)) FILTER (WHERE fits AND NOT behind AND NOT locked) OVER (ORDER BY m.seq) - octet_length(m.body) AS bytes_before
  FROM {lanes} l CROSS JOIN LATERAL ({rows}) m
  WHERE l.token = $1) q
WHERE NOT whole OR bytes_before < $4::bigint
ORDER BY seq
LIMIT $2::int`

// rowsSQL are the rows of a lane l. Each is looked at back to the nearest waiting row of its key.
//
// runsSQL are the same for less where very many rows of a key were released under an old snapshot: their index entries are
// walked over for each row of it. Of a run of rows of one key each is looked at only back to the one before it (previous). So
// a row behind one that is behind may not be said to be; that one's key is told, as it fits. It costs a claim a third more, so
// it is for those that are slow.
const (
	rowsSQL = `
    SELECT o.*, (SELECT true FROM {outbox} p WHERE {before}) IS NOT NULL AS behind, ({free}) IS NULL AS locked, {fits} AS fits FROM {share}`
	runsSQL = `
    SELECT o.*, (SELECT true FROM {outbox} p WHERE p.seq > coalesce(o.previous, 0) AND {before}) IS NOT NULL AS behind
    FROM (SELECT r.*, CASE WHEN lag(r.ordering_key) OVER w = r.ordering_key AND lag(r.fits) OVER w THEN lag(r.seq) OVER w END AS previous
      FROM (SELECT o.*, ({free}) IS NULL AS locked, {fits} AS fits FROM {share}) r
      WINDOW w AS (ORDER BY r.seq)) o`
	shareSQL = `{outbox} o
    WHERE o.lane = l.lane AND o.seq >= l.floor AND {ready} AND o.transport_name <> ALL($3::text[])
    ORDER BY o.seq LIMIT greatest(1, least(l.batch, $2::int / (SELECT count(*)::int FROM {lanes} WHERE token = $1)))`
)

// countLossesSQL returns how many claims in a row, of exactly this message alone, were lost. $1 token, $2 seq
// of the message.
const countLossesSQL = `
UPDATE {lanes} SET losses = CASE WHEN alone = $2::bigint THEN losses ELSE 0 END, alone = $2::bigint WHERE token = $1 RETURNING losses`
