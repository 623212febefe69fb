package ratelimitredis

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/holdfast-go/holdfast/internal/breaker"
	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/internal/lanes"
	"github.com/holdfast-go/holdfast/internal/redisconn"
	"github.com/holdfast-go/holdfast/internal/telemetry"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/driver"
)

const (
	// pipelines is the number of concurrent calls to Redis. Decisions requested in the meantime share the next call.
	// A second call keeps Redis busy while the answer of the first is read. More calls make smaller groups, which
	// cost both sides more.
	pipelines = 2
	// failuresInARow is the number of failures after which only probes are sent.
	failuresInARow = 5
	// probeEvery is the time between probes of a Redis that has failed.
	probeEvery = time.Second
	// silence is the wait after which a leaving caller's connection counts as silent.
	silence = 500 * time.Millisecond
	// idleTest limits the answer of an idle connection.
	idleTest = time.Second
)

// Limiter is a ratelimit.Limiter and a driver.Reserver on Redis. Make it with New. It is safe for concurrent use.
type Limiter struct {
	client redis.UniversalClient
	cfg    Config
	base   string // the first part of all keys
	meters *meters

	decideScript, refundScript, resetScript *script

	sender  *sender
	lanes   *lanes.Lanes[*call]
	breaker *breaker.Breaker
	idle    *redisconn.Idle
	denials *driver.DenyCache // nil: denials are not remembered
	local   *ratelimit.Memory // decides while Redis is unavailable; nil without Config.Replicas
	down    atomic.Bool       // the outage was logged
}

// New returns a Limiter on client. The caller closes the client.
func New(client redis.UniversalClient, cfg Config) (*Limiter, error) {
	if client == nil {
		return nil, errors.New("ratelimitredis: client is nil")
	}
	cfg = cfg.withDefaults(client)
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	meters, err := newMeters(cfg.MeterProvider)
	if err != nil {
		return nil, fmt.Errorf("ratelimitredis: %w", err)
	}
	l := &Limiter{
		client: client, cfg: cfg, base: cfg.base(), meters: meters,
		decideScript: newScript(decideSource), refundScript: newScript(refundSource), resetScript: newScript(resetSource),
		sender:  &sender{client: client, drifted: func(ctx context.Context) { meters.drift.Add(ctx, 1) }},
		breaker: breaker.New(failuresInARow, probeEvery),
		idle:    &redisconn.Idle{Client: client, Timeout: min(cfg.Timeout, idleTest)},
	}
	// A server that does not answer occupies a few goroutines, not one per caller. Only a client that respects
	// deadlines returns to a caller in time.
	heedsDeadlines, _ := redisconn.Timeouts(client)
	l.lanes = &lanes.Lanes[*call]{Send: l.sender.send, Most: pipelines, Timeout: cfg.Timeout, OwnTrips: heedsDeadlines}
	if cfg.DenyCache > 0 {
		l.denials = driver.NewDenyCache(cfg.DenyCache)
	}
	if cfg.Replicas > 0 {
		if l.local, err = ratelimit.NewMemory(ratelimit.MemoryConfig{}); err != nil {
			return nil, err
		}
	}
	return l, nil
}

// Allow implements ratelimit.Limiter.
func (l *Limiter) Allow(ctx context.Context, charges ...ratelimit.Charge) (d ratelimit.Decision, err error) {
	if err := ctx.Err(); err != nil {
		return ratelimit.Decision{}, err
	}
	if l.denials != nil && len(charges) <= driver.MaxCharges && l.denials.Find(charges, &d) {
		l.meters.decided(ctx, &d)
		return d, nil
	}
	return l.observed(ctx, 0, charges)
}

// Reserve implements driver.Reserver.
func (l *Limiter) Reserve(ctx context.Context, within time.Duration, charges ...ratelimit.Charge) (ratelimit.Decision, error) {
	normal, err := ratelimit.Charges(charges).Normalize()
	if err != nil {
		return ratelimit.Decision{}, err
	}
	if err := normal.CheckReserve(within); err != nil {
		return ratelimit.Decision{}, err
	}
	return l.observed(ctx, within.Truncate(time.Millisecond), normal)
}

// Peek returns the decision that Allow would make now, and charges nothing. Its Remaining and Reset are the values
// after the charge, if it would be allowed. It returns ErrUnavailable if Redis is unavailable, even with FailOpen or
// Replicas.
func (l *Limiter) Peek(ctx context.Context, charges ...ratelimit.Charge) (ratelimit.Decision, error) {
	normal, err := ratelimit.Charges(charges).Normalize()
	if err != nil {
		return ratelimit.Decision{}, err
	}
	return l.decide(ctx, 0, false, normal)
}

// Refund implements ratelimit.Limiter. It returns ErrUnavailable if Redis is unavailable, even with FailOpen or
// Replicas. Charges that were counted within the process are refunded there.
func (l *Limiter) Refund(ctx context.Context, charges ...ratelimit.Charge) error {
	normal, err := ratelimit.Charges(charges).Normalize()
	if err != nil {
		return err
	}
	if normal[0].Local && l.local != nil {
		return l.local.Refund(ctx, normal...)
	}
	return l.change(ctx, l.refundScript, normal)
}

// Reset clears the counters of the charges, of the current and the previous window. Other processes may still deny
// for a second; see Config.DenyCache.
func (l *Limiter) Reset(ctx context.Context, charges ...ratelimit.Charge) error {
	normal, err := ratelimit.Charges(charges).Normalize()
	if err != nil {
		return err
	}
	return l.change(ctx, l.resetScript, normal)
}

func (l *Limiter) change(ctx context.Context, s *script, charges []ratelimit.Charge) error {
	err := l.run(ctx, &call{script: s, charges: charges})
	if l.denials != nil {
		l.denials.Forget(charges)
	}
	return err
}

// observed decides, within the process if Redis is unavailable, and records the decision.
func (l *Limiter) observed(ctx context.Context, within time.Duration, given []ratelimit.Charge) (ratelimit.Decision, error) {
	charges, err := ratelimit.Charges(given).Normalize()
	if err != nil {
		return ratelimit.Decision{}, err
	}
	start := time.Now()
	d, err := l.decide(ctx, within, true, charges)
	switch {
	case errors.Is(err, ratelimit.ErrUnavailable):
		if d, err = l.fallBack(ctx, within, charges, err); err != nil {
			l.meters.unavailable(ctx)
			l.meters.took(ctx, time.Since(start))
			return ratelimit.Decision{}, err
		}
	case err != nil:
		return ratelimit.Decision{}, err
	default:
		l.recovered(ctx)
		if l.denials != nil && within == 0 {
			l.denials.Keep(start, given, d)
		}
	}
	l.meters.decided(ctx, &d)
	l.meters.took(ctx, time.Since(start))
	return d, nil
}

// decide runs the script and computes the details from the counters in the reply, with the arithmetic shared by all
// limiters. The charges are normalized.
func (l *Limiter) decide(ctx context.Context, within time.Duration, take bool, charges []ratelimit.Charge) (d ratelimit.Decision, err error) {
	possible := !slices.ContainsFunc(charges, tooMuch)
	c := &call{script: l.decideScript, many: true, charges: charges, take: take && possible, within: within.Milliseconds()}
	if err := l.run(ctx, c); err != nil {
		return ratelimit.Decision{}, err
	}
	var space [3]driver.Counter // most decisions need no more
	counters := space[:0]
	for i, charge := range charges {
		sane := int64(1<<53) / charge.Limit.Window.Milliseconds() // limits values of other systems
		if charge.Limit.Algorithm == ratelimit.TokenBucket {
			sane = 1 << 53
		}
		counters = append(counters, driver.Counter{Prev: min(c.reply[1+2*i], sane), Cur: min(c.reply[2+2*i], sane)})
	}
	d.Decide(time.UnixMilli(c.now), within, take, charges, counters)
	if possible && d.Allowed != (c.reply[0] == 1) {
		return ratelimit.Decision{}, fmt.Errorf("%w: script and client disagree", ratelimit.ErrUnavailable)
	}
	return d, nil
}

// tooMuch reports whether a charge can never be admitted.
func tooMuch(c ratelimit.Charge) bool {
	if c.Limit.Algorithm == ratelimit.TokenBucket {
		return c.Cost > c.Limit.Burst
	}
	return c.Cost > c.Limit.Max
}

// run sends a call, unless the breaker is open. Its error is ErrUnavailable or the error of ctx.
func (l *Limiter) run(ctx context.Context, c *call) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if !l.breaker.Enter() {
		return fmt.Errorf("%w: %w", ratelimit.ErrUnavailable, errOpen)
	}
	c.base = l.base
	start := time.Now()
	err := l.lanes.Do(ctx, c)
	if err == nil {
		err = c.err
	}
	if err != nil && ctx.Err() != nil {
		if time.Since(start) >= silence { // otherwise the next caller would use the next silent connection
			l.unanswered(ctx, c, err)
		}
		return ctx.Err()
	}
	l.breaker.Done(err == nil)
	if err != nil {
		if answered := redis.Error(nil); !errors.As(err, &answered) {
			l.unanswered(ctx, c, err)
		}
		return fmt.Errorf("%w: %w", ratelimit.ErrUnavailable, err)
	}
	return nil
}

// unanswered tests the idle connections, and refreshes the nodes of a cluster.
func (l *Limiter) unanswered(ctx context.Context, c *call, err error) {
	ctx = context.WithoutCancel(ctx) // the caller may have given up
	redisconn.Failed(ctx, l.client, err)
	l.idle.Test(ctx, string(appendName(nil, c.base, c.charges[0])))
}

var errOpen = errors.New("redis did not answer lately; waiting for the next probe")

// fallBack decides while Redis is unavailable, by Config.FailOpen and Config.Replicas. The error is the cause, or the
// error of the local limiter.
func (l *Limiter) fallBack(ctx context.Context, within time.Duration, charges []ratelimit.Charge, cause error) (ratelimit.Decision, error) {
	if !l.cfg.FailOpen && l.local == nil {
		return ratelimit.Decision{}, cause
	}
	if !l.down.Swap(true) {
		l.cfg.Logger.WarnContext(ctx, "ratelimit: store unavailable, deciding without it",
			slog.Bool("counted", l.local != nil), slog.Any("error", cause))
	}
	if l.local == nil {
		return ratelimit.Decision{Allowed: true, Fallback: true}, nil
	}
	d, err := l.countHere(ctx, within, l.shareOf(charges))
	if d.Never && !slices.ContainsFunc(charges, tooMuch) { // above the share of this process, but not above the limit
		d.Never, d.RetryAfter = false, probeEvery
	}
	d.Fallback = true
	return d, err
}

func (l *Limiter) countHere(ctx context.Context, within time.Duration, charges []ratelimit.Charge) (ratelimit.Decision, error) {
	if within > 0 {
		return l.local.Reserve(ctx, within, charges...)
	}
	return l.local.Allow(ctx, charges...)
}

// shareOf returns the charges with this process's share of their limits.
func (l *Limiter) shareOf(charges []ratelimit.Charge) []ratelimit.Charge {
	replicas := int64(l.cfg.Replicas)
	charges = slices.Clone(charges) // a running call may still read them
	for i := range charges {
		limit := &charges[i].Limit
		limit.Max = max(1, limit.Max/replicas)
		if limit.Algorithm == ratelimit.TokenBucket {
			limit.Burst = max(1, limit.Burst/replicas)
		}
	}
	return charges
}

// recovered logs once that Redis answers again.
func (l *Limiter) recovered(ctx context.Context) {
	if l.down.Load() && l.down.Swap(false) {
		l.cfg.Logger.InfoContext(ctx, "ratelimit: store available again")
	}
}

// checkTimeout limits Check, whatever the client's own timeouts are.
const checkTimeout = 5 * time.Second

// Check reports whether the server decides about several limits at once and keeps the counters, and whether the
// client has a timeout for a silent connection. It returns nil if there is no problem. Otherwise Unwrap() []error of
// the error returns the findings: each has the method Fix() string. A failure to read the server has no such method
// and takes at most 5 s. Check changes only the server's script cache.
func (l *Limiter) Check(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	answer := make(chan error, 1)
	go func() { answer <- l.look(ctx) }() // the client may ignore the deadline
	select {
	case err := <-answer:
		return err
	case <-ctx.Done():
		return fmt.Errorf("ratelimitredis: check: %w", ctx.Err())
	}
}

func (l *Limiter) look(ctx context.Context) error {
	found := check.Findings{Component: "ratelimitredis"}
	if err := l.client.Ping(ctx).Err(); err != nil {
		return fmt.Errorf("ratelimitredis: check: %w", err)
	}
	if heedsDeadlines, bounded := redisconn.Timeouts(l.client); !heedsDeadlines && !bounded {
		found.Add("set ContextTimeoutEnabled or a ReadTimeout in the client's options",
			"the client waits forever on a silent connection, and the connection is lost to the pool")
	}
	refused := redis.Error(nil)
	switch err := l.rehearse(ctx); {
	case errors.As(err, &refused):
		found.Add(fixOf(refused), "the server rejects the script: %v", refused)
	case err != nil:
		found.Join(fmt.Errorf("ratelimitredis: check: %w", err))
		return found.Err()
	}
	settings, err := l.client.ConfigGet(ctx, "maxmemory*").Result()
	// A managed server may reject CONFIG GET. Any other failure is an error.
	if err != nil && !errors.As(err, &refused) {
		found.Join(fmt.Errorf("ratelimitredis: check: %w", err))
	}
	if policy := settings["maxmemory-policy"]; settings["maxmemory"] != "0" && policy != "" && !strings.HasPrefix(policy, "noeviction") {
		found.Add("CONFIG SET maxmemory-policy noeviction", "maxmemory-policy is %s: a full server drops counters and admits more than the limits", policy)
	}
	return found.Err()
}

// rehearse decides about limits that nobody uses, and charges nothing.
func (l *Limiter) rehearse(ctx context.Context) error {
	user, global := ratelimit.Limit{Name: "check-user", Max: 1}, ratelimit.Limit{Name: "check-global", Max: 1}
	_, err := l.Peek(ctx, ratelimit.Charge{Limit: user, Key: "check"}, ratelimit.Charge{Limit: global})
	return err
}

func fixOf(refused redis.Error) string {
	if strings.HasPrefix(refused.Error(), "CROSSSLOT") {
		return "set Config.Tag: the server is part of a cluster"
	}
	return "allow the user EVALSHA and EVAL, with TIME, MGET, INCRBY, SET and DEL on keys that begin with Config.Prefix"
}

// Config configures a Limiter. The zero value works.
type Config struct {
	// Prefix is the first part of every Redis key: 1 to 64 of [A-Za-z0-9._:-]. Default: "rate_limit".
	Prefix string

	// Tag puts every key into the cluster slot of the hash tag {Tag}: 1 to 32 of [A-Za-z0-9._-]. Default: none; "rl"
	// with a cluster or ring client, which needs a tag to decide about several keys.
	Tag string

	// Timeout limits a call, whatever the client's own timeouts and retries are. If the client's
	// ContextTimeoutEnabled is set, a call that waits for no other call runs in the caller's goroutine, which is
	// faster. It then ends with the timeout or the deadline of its context, but not when the context is cancelled.
	// Default: 1 s, which is ten times the period after which a container without remaining CPU quota runs again.
	// After five failures callers no longer wait for a silent Redis.
	Timeout time.Duration

	// DenyCache is the number of remembered denials, at least 64. Each is kept until Redis would admit the charge,
	// for at most a second, so that many denied requests cost one round trip a second. A remembered denial also
	// counts during an outage. -1 remembers none. Default: 10,000.
	DenyCache int

	// FailOpen lets requests pass uncounted while Redis is unavailable. Not together with Replicas. Default: such
	// requests get ratelimit.ErrUnavailable, which the middleware answers with 503.
	FailOpen bool

	// Replicas, if above 0, is the number of processes that count on their own while Redis is unavailable. Each
	// process counts with its share of every limit, but at least one unit, and without the counts of Redis. A request
	// that costs more than this share is denied until Redis is available. Default: 0, processes do not count.
	Replicas int

	// Logger logs the start and the end of an outage with FailOpen or Replicas. Default: slog.Default().
	Logger *slog.Logger
	// MeterProvider is for the metrics holdfast.ratelimit.*. Default: the global one.
	MeterProvider metric.MeterProvider
}

func (c Config) withDefaults(client redis.UniversalClient) Config {
	if c.Prefix == "" {
		c.Prefix = "rate_limit"
	}
	if c.Timeout == 0 {
		c.Timeout = time.Second
	}
	if c.DenyCache == 0 {
		c.DenyCache = 10_000
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	_, cluster := client.(*redis.ClusterClient)
	_, ring := client.(*redis.Ring)
	if c.Tag == "" && (cluster || ring) {
		c.Tag = "rl"
	}
	return c
}

func (c Config) validate() error {
	var errs []error
	if !plain(c.Prefix, 64, "._-:") {
		errs = append(errs, fmt.Errorf("ratelimitredis: Config.Prefix %.70q: want 1 to 64 of [A-Za-z0-9._:-]", c.Prefix))
	}
	if c.Tag != "" && !plain(c.Tag, 32, "._-") {
		errs = append(errs, fmt.Errorf("ratelimitredis: Config.Tag %.40q: want 1 to 32 of [A-Za-z0-9._-]", c.Tag))
	}
	if c.Timeout < time.Millisecond {
		errs = append(errs, fmt.Errorf("ratelimitredis: Config.Timeout is %v, must be at least 1ms", c.Timeout))
	}
	if c.DenyCache != -1 && c.DenyCache < 64 {
		errs = append(errs, fmt.Errorf("ratelimitredis: Config.DenyCache is %d, must be at least 64, or -1", c.DenyCache))
	}
	if c.Replicas < 0 {
		errs = append(errs, fmt.Errorf("ratelimitredis: Config.Replicas is %d, must not be negative", c.Replicas))
	}
	if c.FailOpen && c.Replicas > 0 {
		errs = append(errs, errors.New("ratelimitredis: Config has both FailOpen and Replicas"))
	}
	return errors.Join(errs...)
}

// base returns the first part of all keys.
func (c Config) base() string {
	if c.Tag == "" {
		return c.Prefix + ":"
	}
	return c.Prefix + ":{" + c.Tag + "}:"
}

func plain(s string, most int, also string) bool {
	if s == "" || len(s) > most {
		return false
	}
	for i := range len(s) {
		c := s[i]
		letter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
		if !letter && strings.IndexByte(also, c) < 0 {
			return false
		}
	}
	return true
}

const scope = "github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"

// maxLabels limits the limits whose labels are cached.
const maxLabels = 1000

// meters has the instruments.
type meters struct {
	decisions metric.Int64Counter
	duration  metric.Float64Histogram
	remaining metric.Float64Histogram
	drift     metric.Int64Counter

	// labels are made once for each limit, because a remembered denial must be cheap. Readers take no lock; adding a
	// limit replaces the map.
	labels  atomic.Pointer[map[string]*labels]
	growing sync.Mutex
}

// labels are the labels of one limit.
type labels struct {
	allowed, denied bySource
	remaining       []metric.RecordOption
}

// bySource has the labels of a decision, by the part that decided.
type bySource struct{ store, cache, fallback []metric.AddOption }

func newMeters(provider metric.MeterProvider) (*meters, error) {
	meter := telemetry.New(scope, nil, provider).Meter
	m := &meters{}
	m.labels.Store(&map[string]*labels{})
	var errs [4]error
	m.decisions, errs[0] = meter.Int64Counter("holdfast.ratelimit.decisions",
		metric.WithDescription("Decisions by outcome, source and the limit with the smallest share left."), metric.WithUnit("{decision}"))
	m.duration, errs[1] = meter.Float64Histogram("holdfast.ratelimit.duration",
		metric.WithDescription("Duration of decisions that were not cached, including failed ones."), metric.WithUnit("s"), telemetry.Seconds)
	m.remaining, errs[2] = meter.Float64Histogram("holdfast.ratelimit.remaining",
		metric.WithDescription("Smallest share left among the limits of a decision."), metric.WithUnit("1"),
		metric.WithExplicitBucketBoundaries(0, 0.05, 0.1, 0.2, 0.5, 0.8))
	m.drift, errs[3] = meter.Int64Counter("holdfast.ratelimit.drift",
		metric.WithDescription("Calls repeated because the server was in another window."), metric.WithUnit("{question}"))
	return m, errors.Join(errs[:]...)
}

// decided counts a decision, and records the smallest share left among its limits.
func (m *meters) decided(ctx context.Context, d *ratelimit.Decision) {
	limit, share := d.Denied, 0.0
	if limit == "" {
		if s, ok := d.Binding(); ok {
			limit, share = s.Name, float64(s.Remaining)/float64(s.Capacity)
		}
	}
	of := m.of(limit)
	m.decisions.Add(ctx, 1, of.decision(d)...)
	if limit != "" && !d.Cached {
		m.remaining.Record(ctx, share, of.remaining...)
	}
}

// unavailable counts a request without a decision.
func (m *meters) unavailable(ctx context.Context) {
	m.decisions.Add(ctx, 1, decisionLabels("", "unavailable", "none")...)
}

func (m *meters) took(ctx context.Context, d time.Duration) { m.duration.Record(ctx, d.Seconds()) }

// of returns the labels of a limit.
func (m *meters) of(limit string) *labels {
	if known := (*m.labels.Load())[limit]; known != nil {
		return known
	}
	m.growing.Lock()
	defer m.growing.Unlock()
	known := *m.labels.Load()
	if known[limit] != nil {
		return known[limit]
	}
	made := newLabels(limit)
	if len(known) < maxLabels {
		more := maps.Clone(known)
		more[limit] = made
		m.labels.Store(&more)
	}
	return made
}

func newLabels(limit string) *labels {
	by := func(outcome string) bySource {
		return bySource{
			store:    decisionLabels(limit, outcome, "store"),
			cache:    decisionLabels(limit, outcome, "cache"),
			fallback: decisionLabels(limit, outcome, "fallback"),
		}
	}
	name := attribute.NewSet(attribute.String("limit", limit))
	return &labels{allowed: by("allowed"), denied: by("denied"), remaining: []metric.RecordOption{metric.WithAttributeSet(name)}}
}

func decisionLabels(limit, outcome, source string) []metric.AddOption {
	return []metric.AddOption{metric.WithAttributeSet(attribute.NewSet(
		attribute.String("limit", limit), attribute.String("outcome", outcome), attribute.String("source", source)))}
}

// decision returns the labels of a decision.
func (l *labels) decision(d *ratelimit.Decision) []metric.AddOption {
	by := &l.denied
	if d.Allowed {
		by = &l.allowed
	}
	switch {
	case d.Cached:
		return by.cache
	case d.Fallback:
		return by.fallback
	}
	return by.store
}
