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
	// Prefix begins every key. Empty: "idempotency".
	Prefix string
	// Lease is how long a claim lasts without renewal. 0: 30 s.
	Lease time.Duration
	// Retention is how long a completed record lasts. 0: 48 h.
	Retention time.Duration
	// HashTag writes braces around the variable part of a key, so that the two
	// keys of a record share a slot. It is always on with *redis.ClusterClient
	// and *redis.Ring; set it for other clients in front of a cluster.
	HashTag bool
	// WriteResponse writes the body to the field response, too, for systems beside
	// this one that know status and response only. It takes its memory twice.
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

// Store is an driver.Store on Redis. It is safe for concurrent use.
type Store struct {
	client redis.UniversalClient
	lanes  *lanes.Lanes[*call] // nil: every call goes by itself
	server *breaker.Server
	idle   *redisconn.Idle
	cfg    Config
}

// New returns a store on client, which stays the caller's to close.
func New(client redis.UniversalClient, cfg Config) (*Store, error) {
	if client == nil {
		return nil, errors.New("idempotencyredis: client is nil")
	}
	cfg = cfg.withDefaults(client)
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	s := &Store{client: client, cfg: cfg, idle: &redisconn.Idle{Client: client, Timeout: breaker.Longest}}
	s.server = breaker.NewServer(answered, func(context.Context) {}) // which node is silent, run knows
	if !sharded(client) {                                            // a node that is down must not hold up calls to the others
		// Only a client that heeds deadlines lets go of a caller in time.
		heedsDeadlines, _ := redisconn.Timeouts(client)
		s.lanes = &lanes.Lanes[*call]{Send: s.send, Most: maxTrips, Timeout: breaker.Longest, OwnTrips: heedsDeadlines}
	}
	return s, nil
}

const maxTrips = 4 // under way at once

// The transitions. Each is one script, so that it happens as a whole.
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

// names returns those of the record and of its lock.
func (s *Store) names(key driver.Key) (record, lock string) {
	name := string(key)
	if s.cfg.HashTag {
		name = "{" + name + "}"
	}
	return s.cfg.Prefix + ":" + name, s.cfg.Prefix + ":lock:" + name
}

// held runs a script that works for the holder of the lock only.
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
	if created, err := strconv.ParseInt(text, 10, 64); err == nil { // another system does not tell
		known.Since = time.UnixMilli(created)
	}
	if left, ok := fields[8].(int64); ok { // less than 0: it has no end
		known.Left = time.Duration(max(0, left)) * time.Millisecond
	}
	return known, nil
}

// decodeOutcome reads the reply of begin.lua, or of look.lua: 1 when acquired, else a status and
// what is known.
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
	n, _ := strconv.Atoi(version) // an unreadable version is one that no request has
	return driver.Fingerprint{Version: n, Sum: sum}
}

// decodeResponse reads a completed record: ours, or one of a system that
// writes the body alone, into the field response. What cannot be read is a
// tombstone: the work was done.
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

// Check looks for settings of the server under which records can vanish before
// their time, and for a client that waits for ever. nil: nothing is wrong. Otherwise
// each joined error is a finding, with the method Mend, or says that the server could
// not be looked at, which it finds out within seconds.
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
		found.Add("CONFIG SET maxmemory-policy noeviction, or give the store a Redis of its own",
			"maxmemory-policy is %s: a full server drops keys, and a dropped key runs again", policy)
	}
	if heedsDeadlines, bounded := redisconn.Timeouts(s.client); !heedsDeadlines && !bounded {
		found.Add("set ContextTimeoutEnabled of the client's options, or a ReadTimeout",
			"the client waits for ever for a connection that has fallen silent, and loses it for its pool")
	}
	return found.Err()
}

// evictionPolicy returns the policy by which the server drops keys, "" if it drops none.
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

// script is a script and its name on the server.
type script struct{ source, sha string }

func newScript(source string) script { return script{source, redis.NewScript(source).Hash()} }

// call is one run of a script and, later, its reply.
type call struct {
	script script
	args   []any // of EVALSHA; the first two are filled in
	cmd    *redis.Cmd
}

// run runs a script on the record of the claim's key, and its lock. With guarded it
// spares a server that has not answered lately.
func (s *Store) run(ctx context.Context, guarded bool, script script, claim driver.Claim, args ...any) (reply any, err error) {
	record, lock := s.names(claim.Key)
	err = s.server.Ask(ctx, guarded, func(ctx context.Context) (err error) {
		// Each try has a call of its own: that of an earlier one may be on its way.
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

// carry has the call answered, unless ctx ends before.
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

// answered reports whether an error is Redis's own answer.
func answered(err error) bool {
	answer := redis.Error(nil)
	return errors.As(err, &answer)
}

// send leaves the replies in the calls. Every script may run again, so that the
// client may repeat a trip that broke off.
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
	// mostSeen is how many keys of a node InFlight goes through at most, and seenPerTrip at a time.
	mostSeen    = 100_000
	seenPerTrip = 1000
	// seeing is for how long it does, no longer than half of what it has: the rest is left for slow answers.
	seeing = time.Second
)

// InFlight returns how many claims are held now, those of other systems included. Redis has no list of them, so that it
// goes through the keys of the database: 100,000 of each node at most, for a second at most. Where there are more, the
// number is not exact but an estimate from those: near the truth where many claims are held, and maybe 0 where few are.
// It is up to 100 SCANs of 1,000 keys: count seldom. It needs the right to SCAN and DBSIZE. With Config.HashTag and a client
// that is neither *redis.ClusterClient nor *redis.Ring the error is errors.ErrUnsupported: the nodes are not known.
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

// locks are how many there are.
type locks struct {
	count     int
	estimated bool
}

// inFlight counts the locks in at most so many keys of each node, for at most so long.
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

// globs escapes what has a meaning in a pattern.
var globs = strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`, `]`, `\]`)

// locksOf counts the locks of a node. Keys come in the order of their hashes, which is none: some are a fair sample of all.
func (s *Store) locksOf(ctx context.Context, node redis.Cmdable, most int, bound time.Duration) (locks, error) {
	pattern := globs.Replace(s.cfg.Prefix) + ":lock:*"
	found := map[string]bool{} // a scan may tell a key twice
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
