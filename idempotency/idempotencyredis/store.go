package idempotencyredis

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/internal/headers"
	"github.com/holdfast-go/holdfast/internal/breaker"
	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/internal/lanes"
	"github.com/holdfast-go/holdfast/internal/redisconn"
)

// Config configures a Store. The zero value is the standard layout.
type Config struct {
	// Prefix is the first part of every Redis key. Empty: "idempotency".
	Prefix string
	// Lease is how long a claim lasts without renewal. 0: 30 s.
	Lease time.Duration
	// Retention is how long a completed record lasts. 0: 48 h.
	Retention time.Duration
	// HashTag writes braces around the variable part of a Redis key, so that the two keys of a record share a slot.
	// It is always on with *redis.ClusterClient and *redis.Ring; set it for other clients in front of a cluster.
	HashTag bool
	// WriteResponse also writes the body to the field response, for other systems that know only status and response.
	// The body then takes twice the memory.
	WriteResponse bool
}

func (c Config) withDefaults(client redis.UniversalClient) Config {
	if c.Prefix == "" {
		c.Prefix = "idempotency"
	}
	if c.Lease == 0 {
		c.Lease = 30 * time.Second
	}
	if c.Retention == 0 {
		c.Retention = 48 * time.Hour
	}
	c.HashTag = c.HashTag || sharded(client)
	return c
}

func sharded(client redis.UniversalClient) bool {
	switch client.(type) {
	case *redis.ClusterClient, *redis.Ring:
		return true
	}
	return false
}

func (c Config) validate() error {
	var errs []error
	if strings.ContainsAny(c.Prefix, "{}") {
		errs = append(errs, errors.New("idempotencyredis: Prefix must not contain braces"))
	}
	if c.Lease < 10*time.Millisecond {
		errs = append(errs, errors.New("idempotencyredis: Lease must be at least 10ms"))
	}
	if c.Retention < c.Lease {
		errs = append(errs, errors.New("idempotencyredis: Retention must not be shorter than Lease"))
	}
	return errors.Join(errs...)
}

// Store is a driver.Store on Redis. It is safe for concurrent use.
type Store struct {
	client redis.UniversalClient
	lanes  *lanes.Lanes[*call] // nil: every call is a round trip of its own
	server *breaker.Server
	idle   *redisconn.Idle
	cfg    Config
}

// New returns a store on client. The caller closes the client.
func New(client redis.UniversalClient, cfg Config) (*Store, error) {
	if client == nil {
		return nil, errors.New("idempotencyredis: client is nil")
	}
	cfg = cfg.withDefaults(client)
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	s := &Store{client: client, cfg: cfg, idle: &redisconn.Idle{Client: client, Timeout: breaker.Longest}}
	s.server = breaker.NewServer(answered, func(context.Context) {}) // run finds the silent node
	if !sharded(client) {                                            // a node that is down must not delay calls to the others
		// Only a client that respects deadlines returns to a caller in time.
		heedsDeadlines, _ := redisconn.Timeouts(client)
		s.lanes = &lanes.Lanes[*call]{Send: s.send, Most: maxTrips, Timeout: breaker.Longest, OwnTrips: heedsDeadlines}
	}
	return s, nil
}

const maxTrips = 4 // at the same time

// The transitions. Each is one script, so it is atomic.
var (
	//go:embed begin.lua
	beginText string
	//go:embed extend.lua
	extendText string
	//go:embed complete.lua
	completeText string
	//go:embed release.lua
	releaseText string

	beginScript    = newScript(beginText)
	extendScript   = newScript(extendText)
	completeScript = newScript(completeText)
	releaseScript  = newScript(releaseText)
)

// Begin implements driver.Store.
func (s *Store) Begin(ctx context.Context, claim driver.Claim) (driver.BeginResult, error) {
	if err := claim.Key.Validate(); err != nil {
		return driver.BeginResult{}, err
	}
	fp := claim.Fingerprint
	reply, err := s.run(ctx, s.lanes != nil, beginScript, claim, claim.Token, fp.Version, fp.Sum, s.cfg.Lease.Milliseconds(), time.Now().UnixMilli())
	if err != nil {
		return driver.BeginResult{}, explain("begin", err)
	}
	out, err := decodeOutcome("begin", reply)
	if err != nil {
		return driver.BeginResult{}, err
	}
	if out.State == driver.Acquired {
		out.Lease = s.cfg.Lease
	}
	return out, nil
}

// Extend implements driver.Store.
func (s *Store) Extend(ctx context.Context, claim driver.Claim) error {
	return s.held(ctx, "extend", extendScript, claim, claim.Token, s.cfg.Lease.Milliseconds())
}

// Complete implements driver.Store.
func (s *Store) Complete(ctx context.Context, claim driver.Claim, resp driver.Response) error {
	hdr, err := headers.Encode(resp.Header)
	if err != nil {
		return fmt.Errorf("idempotencyredis: complete: %w", err)
	}
	fp := claim.Fingerprint
	return s.held(ctx, "complete", completeScript, claim,
		claim.Token, fp.Version, fp.Sum, resp.Status, hdr, resp.Body, s.cfg.Retention.Milliseconds(),
		s.cfg.WriteResponse)
}

// Release implements driver.Store.
func (s *Store) Release(ctx context.Context, claim driver.Claim) error {
	return s.held(ctx, "release", releaseScript, claim, claim.Token)
}

// names returns the Redis names of the record and of its lock.
func (s *Store) names(key driver.Key) (record, lock string) {
	name := string(key)
	if s.cfg.HashTag {
		name = "{" + name + "}"
	}
	return s.cfg.Prefix + ":" + name, s.cfg.Prefix + ":lock:" + name
}

// held runs a script that changes something only for the holder of the lock.
func (s *Store) held(ctx context.Context, step string, script script, claim driver.Claim, args ...any) error {
	reply, err := s.run(ctx, false, script, claim, args...)
	switch {
	case err != nil:
		return explain(step, err)
	case reply != int64(1):
		return fmt.Errorf("idempotencyredis: %s: %w", step, driver.ErrLeaseLost)
	}
	return nil
}

func explain(step string, err error) error {
	if strings.Contains(err.Error(), "WRONGTYPE") {
		err = fmt.Errorf("%w: a key of this name holds another type (the record is a hash, the lock a string): %w", driver.ErrForeignRecord, err)
	}
	return fmt.Errorf("idempotencyredis: %s: %w", step, err)
}

func milliseconds(text string) (time.Duration, error) {
	n, err := strconv.ParseInt(text, 10, 64)
	return time.Duration(n) * time.Millisecond, err
}

var (
	//go:embed look.lua
	lookText   string
	lookScript = newScript(lookText)
)

// Look implements driver.Looker.
func (s *Store) Look(ctx context.Context, key driver.Key) (driver.Known, error) {
	if err := key.Validate(); err != nil {
		return driver.Known{}, err
	}
	reply, err := s.run(ctx, false, lookScript, driver.Claim{Key: key})
	if err != nil {
		return driver.Known{}, explain("look", err)
	}
	return decodeKnown(reply)
}

// decodeKnown reads the reply of look.lua.
func decodeKnown(reply any) (driver.Known, error) {
	fields, _ := reply.([]any)
	if len(fields) > 0 && fields[0] == "free" {
		return driver.Known{}, nil
	}
	out, err := decodeOutcome("look", reply)
	if err != nil {
		return driver.Known{}, err
	}
	known := driver.Known{State: out.State, Fingerprint: out.Fingerprint, Response: out.Response}
	if len(fields) < 9 {
		return known, nil
	}
	text, _ := fields[7].(string)
	if created, err := strconv.ParseInt(text, 10, 64); err == nil { // other systems do not store it
		known.Since = time.UnixMilli(created)
	}
	if left, ok := fields[8].(int64); ok { // below 0: no expiry
		known.Left = time.Duration(max(0, left)) * time.Millisecond
	}
	return known, nil
}

// decodeOutcome reads the reply of begin.lua or look.lua: 1 if acquired, otherwise a status and the fields of the
// record.
func decodeOutcome(step string, reply any) (driver.BeginResult, error) {
	if reply == int64(1) {
		return driver.BeginResult{State: driver.Acquired}, nil
	}
	fields, _ := reply.([]any)
	field := func(i int) (string, bool) {
		if i >= len(fields) {
			return "", false
		}
		text, ok := fields[i].(string)
		return text, ok
	}
	state, _ := field(0)
	out := driver.BeginResult{Fingerprint: decodeFingerprint(field)}
	switch state {
	case "processing":
		left, _ := field(3)
		lease, err := milliseconds(left)
		if err != nil {
			return out, fmt.Errorf("idempotencyredis: %s: lease left: %w", step, err)
		}
		out.State, out.Lease = driver.InProgress, lease
		return out, nil
	case "completed":
		out.State, out.Response = driver.Completed, decodeResponse(field)
		return out, nil
	}
	return out, fmt.Errorf("idempotencyredis: %s: record has an unknown status: %w", step, driver.ErrForeignRecord)
}

func decodeFingerprint(field func(int) (string, bool)) driver.Fingerprint {
	version, _ := field(1)
	sum, _ := field(2)
	n, _ := strconv.Atoi(version) // an unreadable version becomes 0, which no request has
	return driver.Fingerprint{Version: n, Sum: sum}
}

// decodeResponse reads a completed record: one of this package, or one of a system that writes only the body, to the
// field response. An unreadable record is a tombstone, because the work was done.
func decodeResponse(field func(int) (string, bool)) driver.Response {
	code, ours := field(3)
	if !ours {
		body, ok := field(6)
		if !ok {
			return driver.Response{}
		}
		return driver.Response{
			Status: http.StatusOK,
			Header: http.Header{"Content-Type": {"application/json"}},
			Body:   []byte(body),
		}
	}
	status, err := strconv.Atoi(code)
	if err != nil {
		return driver.Response{}
	}
	hdr, _ := field(4)
	header, err := headers.Decode(hdr)
	if err != nil {
		return driver.Response{}
	}
	body, _ := field(5)
	return driver.Response{Status: status, Header: header, Body: []byte(body)}
}

// Check looks for server settings that delete records too early, and for a client without a timeout. nil: no problem.
// Otherwise each joined error is a finding with the method Fix, or the error that the server could not be reached,
// which takes a few seconds.
func (s *Store) Check(ctx context.Context) error {
	found := check.Findings{Component: "idempotencyredis"}
	var policy string
	err := s.server.Ask(ctx, false, func(ctx context.Context) (err error) {
		policy, err = redisconn.Leave(ctx, s.evictionPolicy)
		return err
	})
	if err != nil {
		return fmt.Errorf("idempotencyredis: check: %w", err)
	}
	if policy != "" {
		found.Add("CONFIG SET maxmemory-policy noeviction, or give the store its own Redis",
			"maxmemory-policy is %s: a full server drops keys, and a dropped key runs again", policy)
	}
	if heedsDeadlines, bounded := redisconn.Timeouts(s.client); !heedsDeadlines && !bounded {
		found.Add("set ContextTimeoutEnabled or a ReadTimeout in the client's options",
			"the client waits forever on a silent connection, and the connection is lost to the pool")
	}
	return found.Err()
}

// evictionPolicy returns the policy by which the server evicts keys, or "" if it never evicts.
func (s *Store) evictionPolicy(ctx context.Context) (string, error) {
	info, err := s.client.InfoMap(ctx, "memory").Result()
	if err != nil {
		return "", err
	}
	memory := info["Memory"]
	policy := memory["maxmemory_policy"]
	if memory["maxmemory"] == "0" || policy == "noeviction" {
		return "", nil
	}
	return policy, nil
}

// script is a script and its SHA-1 on the server.
type script struct{ source, sha string }

func newScript(source string) script { return script{source, redis.NewScript(source).Hash()} }

// call is one run of a script and, later, its reply.
type call struct {
	script script
	args   []any // of EVALSHA; command fills in the first two
	cmd    *redis.Cmd
}

// run runs a script on the record of the claim's key and on its lock. With guarded the breaker limits the calls to a
// server that has not answered lately.
func (s *Store) run(ctx context.Context, guarded bool, script script, claim driver.Claim, args ...any) (reply any, err error) {
	record, lock := s.names(claim.Key)
	err = s.server.Ask(ctx, guarded, func(ctx context.Context) (err error) {
		// Each try has its own call, because the call of an earlier try may still be running.
		c := &call{script: script, args: append([]any{"", "", 2, record, lock}, args...)}
		if err = s.carry(ctx, c); err == nil {
			reply, err = c.cmd.Result()
		}
		if err != nil && !answered(err) {
			redisconn.Failed(ctx, s.client, err)
			s.idle.Test(ctx, record)
		}
		return err
	})
	return reply, err
}

// carry sends the call and waits for its answer or the end of ctx.
func (s *Store) carry(ctx context.Context, c *call) error {
	if s.lanes != nil {
		return s.lanes.Do(ctx, c)
	}
	_, err := redisconn.Leave(ctx, func(ctx context.Context) (struct{}, error) {
		s.send(ctx, []*call{c})
		return struct{}{}, nil
	})
	return err
}

// answered reports whether err is an answer of Redis.
func answered(err error) bool {
	answer := redis.Error(nil)
	return errors.As(err, &answer)
}

// send stores the replies in the calls. Every script may run again, so the client may repeat an interrupted round
// trip.
func (s *Store) send(ctx context.Context, batch []*call) {
	if len(batch) == 1 {
		_ = s.client.Process(ctx, batch[0].byName(ctx)) // the command holds the error
	} else {
		pipe := s.client.Pipeline()
		for _, c := range batch {
			_ = pipe.Process(ctx, c.byName(ctx)) // queues it
		}
		_, _ = pipe.Exec(ctx) // the commands hold the errors
	}
	for _, c := range batch {
		if err := c.cmd.Err(); err != nil && strings.HasPrefix(err.Error(), "NOSCRIPT") {
			_ = s.client.Process(ctx, c.command(ctx, "eval", c.script.source))
		}
	}
}

func (c *call) byName(ctx context.Context) *redis.Cmd {
	return c.command(ctx, "evalsha", c.script.sha)
}

func (c *call) command(ctx context.Context, name, script string) *redis.Cmd {
	c.args[0], c.args[1] = name, script
	c.cmd = redis.NewCmd(ctx, c.args...)
	return c.cmd
}

const (
	// mostSeen limits the keys of a node that InFlight reads; seenPerTrip is the number per SCAN.
	mostSeen    = 100_000
	seenPerTrip = 1000
	// seeing limits its time. It also takes at most half of the caller's time: the rest is for slow answers.
	seeing = time.Second
)

// InFlight returns the number of held claims, including those of other systems. Redis has no list of them, so it
// reads the keys of the database: at most 100,000 of each node, for at most a second. If there are more keys, exact
// is false and the number is an estimate: good if many claims are held, and maybe 0 if few are. It sends up to 100
// SCANs of 1,000 keys, so call it seldom. It needs permission for SCAN and DBSIZE. With Config.HashTag and a client
// that is neither *redis.ClusterClient nor *redis.Ring, the error is errors.ErrUnsupported, because the nodes are
// unknown.
func (s *Store) InFlight(ctx context.Context) (n int, exact bool, err error) {
	if s.cfg.HashTag && !sharded(s.client) {
		return 0, false, fmt.Errorf("idempotencyredis: in flight: %w: the nodes behind a %T cannot be listed", errors.ErrUnsupported, s.client)
	}
	var found locks
	err = s.server.Ask(ctx, s.lanes != nil, func(ctx context.Context) (err error) {
		found, err = redisconn.Leave(ctx, func(ctx context.Context) (locks, error) { return s.inFlight(ctx, mostSeen, seeing) })
		return err
	})
	if err != nil {
		return 0, false, fmt.Errorf("idempotencyredis: in flight: %w", err)
	}
	return found.count, !found.estimated, nil
}

// locks is a number of locks.
type locks struct {
	count     int
	estimated bool
}

// inFlight counts the locks among at most most keys of each node, for at most bound.
func (s *Store) inFlight(ctx context.Context, most int, bound time.Duration) (locks, error) {
	var total atomic.Int64
	var estimated atomic.Bool
	count := func(ctx context.Context, node *redis.Client) error {
		found, err := s.locksOf(ctx, node, most, bound)
		total.Add(int64(found.count))
		if found.estimated {
			estimated.Store(true)
		}
		return err
	}
	var err error
	switch client := s.client.(type) {
	case *redis.ClusterClient:
		err = client.ForEachMaster(ctx, count)
	case *redis.Ring:
		err = client.ForEachShard(ctx, count)
	default:
		return s.locksOf(ctx, client, most, bound)
	}
	return locks{int(total.Load()), estimated.Load()}, err
}

// globs escapes the special characters of a pattern.
var globs = strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`, `]`, `\]`)

// locksOf counts the locks of a node. SCAN returns keys in hash order, so the first keys are a fair sample of all.
func (s *Store) locksOf(ctx context.Context, node redis.Cmdable, most int, bound time.Duration) (locks, error) {
	pattern := globs.Replace(s.cfg.Prefix) + ":lock:*"
	found := map[string]bool{} // SCAN may return a key twice
	if end, ok := ctx.Deadline(); ok {
		bound = min(bound, time.Until(end)/2)
	}
	began, cursor, seen := time.Now(), uint64(0), 0
	for seen < most && (seen == 0 || time.Since(began) < bound) {
		names, next, err := node.Scan(ctx, cursor, pattern, seenPerTrip).Result()
		if err != nil {
			return locks{}, err
		}
		for _, name := range names {
			found[name] = true
		}
		if next == 0 {
			return locks{count: len(found)}, nil
		}
		cursor, seen = next, seen+seenPerTrip
	}
	keys, err := node.DBSize(ctx).Result()
	if err != nil {
		return locks{}, err
	}
	return locks{int(int64(len(found)) * max(keys, int64(seen)) / int64(seen)), true}, nil
}
