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
	"strings"
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
//	│    lower           every 5 s: scan below the floors (horizon.go)
//	│    claimSQL        end the leases of lost claims, lease free lanes
//	│    readSQL         read the ready messages of these lanes, in stored order
//	│    COMMIT          without waiting for the disk
//	│                  more only if needed:
//	│    hold            hold messages that are behind a waiting one of their key (waiting.go)
//	│    Settle          release the lanes if the batch has no message
//	│    countLosses     if a suspect lane returned a single message
//	├─ release, take   again, if nothing was ready and a waiting message has become due
//	└─ checkHidden     if nothing was ready, every 30 s at most (check.go)
//
// A message that was read is left out of the batch in three cases: another session has locked its row, its outcome
// was refused, or it is behind a waiting message of its key. Later messages of its key are left out too, unless the
// refused outcome is that it was published.
//
// A claim whose COMMIT was not answered may have leased lanes. The next claim sends its token (lostClaims), and the
// server ends these leases. A lane has one token at a time, so a settlement with an older token changes nothing.

// Claim implements driver.Source. It changes only messages that it holds or releases: see waiting.go. If it finds
// nothing, it releases messages that became due meanwhile, and tries once more.
func (s *Store) Claim(ctx context.Context, req driver.Claim) (driver.Batch, error) {
	if req.Limit < 1 || req.Lease < time.Microsecond {
		return driver.Batch{}, fmt.Errorf("outboxpgx: claim: Limit is %d and Lease is %v, want at least 1 and 1 µs", req.Limit, req.Lease)
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
		s.complain(ctx, "outboxpgx: could not hold or release messages", slog.Any("error", c.refused))
	}
	if rest := s.refusals.rest(!c.aside || len(c.batch.Leases) > 0); rest || c.refused != nil {
		c.batch.More = c.batch.More && len(c.batch.Leases) > 0
		c.batch.Due = refusedDelay
	}
	c.batch.Refused = errors.Join(s.refusals.err(), s.t.explain(c.refused), s.hidden.err())
	return c.batch, nil
}

// claimOrRelease claims, and releases due messages. A failed release does not block ready messages.
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

// claim holds the parameters and the results of one claim.
type claim struct {
	req   driver.Claim
	token int64

	batch  driver.Batch
	era    int64 // of the lanes
	seen   int64 // the highest sequence number
	looked bool  // this claim first scanned below the floors
	single bool  // a suspect lane returns one message at a time
	behind bool  // some ready rows were behind a waiting row of their key
	aside  bool  // some ready rows had refused outcomes
	store  *Store
	due    *int64 // microseconds until the first waiting row is due; at most 0: due now; nil: none waits
	ends   *int64 // microseconds until the first lease of another claim expires; nil: there is none

	ignored int64 // leases that the table ignored
	refused error // why waiting rows could not be held or released
}

// overdueDelay is the time until the next claim if due rows are in busy lanes.
const overdueDelay = 10 * time.Millisecond

// take leases lanes and reads their messages. If its outcome is unknown, the next claim releases the lanes.
func (s *Store) take(ctx context.Context, c *claim) error {
	*c = claim{req: c.req, token: newToken(), store: s, refused: c.refused}
	begin := time.Now()
	err := s.sendClaim(ctx, c)
	if err == nil && c.ignored > 0 {
		err = pgcall.Ignored(s.t.lanes, fmt.Sprintf("the lease of %d lanes", c.ignored))
	}
	s.slow.took(time.Since(begin))
	if err == nil && len(c.batch.Leases) > 0 && s.horizon.saw(c.era, c.seen) && !c.looked {
		c.batch.Messages, c.batch.Unreadable = nil, nil // released
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

// expect stores the time until a claim may find messages again.
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

// sendClaim sends a claim. Every lookInterval it first scans below the floors. With an old snapshot, the scan may
// meet very many index entries of deleted rows, because the floors exist to spare claims these entries. The scan then
// ends early, and the claim is sent again without it.
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

// leases reads the leased lanes and the last row, which has no lane.
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

// unreadable records that the next message could not be decoded.
func (c *claim) unreadable(err error) {
	if c.batch.Unreadable == nil {
		c.batch.Unreadable = map[int]error{}
	}
	c.batch.Unreadable[len(c.batch.Messages)] = err
}

// countLosses returns the number of lost claims of this one message alone.
func (s *Store) countLosses(ctx context.Context, c *claim) (losses int, err error) {
	err = s.use(ctx, func(ctx context.Context, conn *pgxpool.Conn) error {
		return conn.QueryRow(ctx, s.sql.countLosses, c.token, c.seen).Scan(&losses)
	})
	return losses, err
}

// A session may lock a message for any length of time: somebody changed it by hand without a commit, or a row of
// another table refers to it. A claim then leaves out the message and the later messages of its key, which must not
// overtake it. See free in store.go.

// stuckKeys has the keys of messages that were left out.
type stuckKeys map[string]bool

// leaveOut reports whether to leave out a message because it is locked or behind a locked message of its key. Call it
// in stored order.
func (s stuckKeys) leaveOut(key string, locked bool) bool {
	if locked && key != "" {
		s[key] = true
	}
	return locked || s[key]
}

// Other programs write to the table too. An invalid row of theirs must not make other rows unreadable. Every column
// is therefore scanned into a type that accepts any value, and decoded separately.

// record is a row with the columns of recordColumns. The id is scanned as bytes, because the client would convert a
// uuid.UUID to text first.
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

// dest returns the scan destinations of recordColumns, followed by more.
func (r *record) dest(more ...any) []any {
	return append([]any{
		&r.id, &r.name, &r.contentType, &r.body, &r.headers, &r.key, &r.transport, &r.exchange, &r.routingKey, &r.routeHeaders,
		&r.createdAt, &r.attempts, &r.size, &r.whole,
	}, more...)
}

// message decodes the record. With an error, the message has all fields that could be decoded.
func (r *record) message() (driver.Message, error) {
	m := driver.Message{
		ID: r.id, Name: r.name, ContentType: r.contentType, Body: r.body, Key: r.key.String, Transport: r.transport,
		Exchange: r.exchange, RoutingKey: r.routingKey,
		CreatedAt: r.createdAt.Time, Attempts: max(0, r.attempts),
	}
	var err1, err2, err3, err4 error
	if !r.whole {
		err4 = fmt.Errorf("too large to be read: a body of %d bytes, or another column above its limit", r.size)
	}
	m.Headers, err1 = decodeHeaders("headers", r.headers)
	m.RouteHeaders, err2 = decodeHeaders("route_headers", r.routeHeaders)
	if r.createdAt.InfinityModifier != pgtype.Finite {
		err3 = errors.New("created_at is infinite")
	}
	return m, errors.Join(err1, err2, err3, err4)
}

// decodeHeaders accepts [] as no headers, because PHP encodes an empty map like that.
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

// slowClaims records when a claim was slow. The likely cause is the one described at runsSQL.
type slowClaims struct {
	mu   sync.Mutex
	last time.Time
}

const (
	slowClaim = time.Second // a relay's claim times out after 5 s
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

// newToken returns a random number that no other claim has, in any process at any time.
func newToken() int64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return int64(binary.BigEndian.Uint64(b[:]))
}

// lostClaims are this Store's claims with an unknown outcome. They may hold lanes without publishing anything. Each
// is remembered until its lease expires, because its COMMIT may arrive late.
type lostClaims struct {
	mu   sync.Mutex
	list []lostClaim
}

type lostClaim struct {
	token int64
	until time.Time
}

// maxLost is more than the number of lanes: of so many claims, only a few can hold a lane.
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

// recordColumns are the columns of a record. Texts are read if they fit, and the body if the row is whole. The key is
// always read: a row that does not fit keeps back its key like any other. {body} is false if the body is not wanted,
// {content} if the headers are not.
const recordColumns = `id, CASE WHEN texts THEN name ELSE left(name, 128) END, CASE WHEN texts THEN content_type ELSE '' END, CASE WHEN whole AND {body} THEN body END,
  CASE WHEN texts AND {content} THEN headers END, left(ordering_key, 255), CASE WHEN texts THEN transport_name ELSE '' END,
  CASE WHEN texts THEN exchange ELSE '' END, CASE WHEN texts THEN routing_key ELSE '' END, CASE WHEN texts AND {content} THEN route_headers END,
  created_at, attempts, octet_length(body), whole`

// recordWith returns recordColumns with a condition for the body and the headers.
func recordWith(content string) string {
	return strings.NewReplacer("{body}", content, "{content}", content).Replace(recordColumns)
}

// recordWithoutBody returns recordColumns with the headers only.
func recordWithoutBody() string {
	return strings.NewReplacer("{body}", "false", "{content}", "true").Replace(recordColumns)
}

// fits limits the bytes read of a row o: its body, its texts as outbox.Prepare does, and its headers in their stored
// form. Every message that outbox.Prepare accepts fits.
const fits = `octet_length(o.body) <= {max} AND octet_length(o.name) <= 128 AND octet_length(o.content_type) <= 127 AND octet_length(o.transport_name) <= 64
  AND octet_length(o.exchange) <= 127 AND octet_length(o.routing_key) <= 255 AND coalesce(pg_column_size(o.headers), 0) + coalesce(pg_column_size(o.route_headers), 0) <= 65536`

// claimSQL leases lanes: see migrations/0006_outbox_relay.sql. $1 token, $2 microseconds of the lease, $3 lanes, $4
// transports to skip, $5 limit, $6 whether the relay has no other batch in flight, $7 tokens of lost claims.
const claimSQL = `
SELECT lane, single, doubtful, era, due_us, ends_us, dropped
FROM {claim}($1::bigint, $2::bigint, $3::integer, $4::text[], $5::integer, $6::boolean, $7::bigint[])`

// readSQL reads the rows of the lanes just leased. From each lane it reads its share of the limit, in order, until
// the bodies reach the byte limit. Three kinds of rows come without a body: rows behind a waiting row of their key,
// rows locked by another session, and rows that are too large. It runs as a separate statement after claimSQL, with
// the same settings, because its snapshot must be newer than the lock on the lane. $1 token, $2 limit, $3 transports
// to skip, $4 bytes.
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

// rowsSQL returns the rows of a lane l. For each row it scans back to the nearest waiting row of its key.
//
// runsSQL is a cheaper form for an old snapshot with very many released rows of one key, because rowsSQL then walks
// over their index entries for each row of the key. In a run of rows of one key, runsSQL scans back only to the
// previous row (previous). It may therefore not mark a row that is behind a marked row. This is no problem, because
// marking one row of a key is enough. It makes a normal claim a third more expensive, so only claims after a slow one
// use it.
const (
	rowsSQL = `
    SELECT o.*, (SELECT true FROM {outbox} p WHERE {before}) IS NOT NULL AS behind, ({free}) IS NULL AS locked, {fits} AS fits FROM {share}`
	runsSQL = `
    SELECT o.*, (SELECT true FROM {outbox} p WHERE p.seq > coalesce(o.previous, 0) AND {before}) IS NOT NULL AS behind
    FROM (SELECT r.*, CASE WHEN lag(r.ordering_key) OVER w = r.ordering_key THEN lag(r.seq) OVER w END AS previous
      FROM (SELECT o.*, ({free}) IS NULL AS locked, {fits} AS fits FROM {share}) r
      WINDOW w AS (ORDER BY r.seq)) o`
	shareSQL = `{outbox} o
    WHERE o.lane = l.lane AND o.seq >= l.floor AND {ready} AND o.transport_name <> ALL($3::text[])
    ORDER BY o.seq LIMIT greatest(1, least(l.batch, $2::int / (SELECT count(*)::int FROM {lanes} WHERE token = $1)))`
)

// countLossesSQL returns how many claims in a row, of exactly this message alone, were lost. $1 token, $2 seq of the
// message.
const countLossesSQL = `
UPDATE {lanes} SET losses = CASE WHEN alone = $2::bigint THEN losses ELSE 0 END, alone = $2::bigint WHERE token = $1 RETURNING losses`
