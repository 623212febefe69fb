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
	// pipelines is how many calls to Redis may be under way at once; decisions that are asked for
	// meanwhile travel together in the next one. A second one keeps Redis busy while the first is
	// read; more make smaller groups, which cost both sides more.
	pipelines = 2
	// failuresInARow stop the calls but for a probe.
	failuresInARow = 5
	// probeEvery is how often a Redis that has failed so often is asked again.
	probeEvery = time.Second
	// silence is how long a caller waits, and then leaves, for its connection to count as silent.
	silence = 500 * time.Millisecond
	// idleTest is how long an idle connection may take to answer.
	idleTest = time.Second
)

// Limiter is a ratelimit.Limiter, and a driver.Reserver, on Redis. Make it with New. It is safe for
// concurrent use.
type Limiter struct {
	client redis.UniversalClient
	cfg    Config
	base   string // of the keys
	meters *meters

	decideScript, refundScript, resetScript *script

	sender  *sender
	lanes   *lanes.Lanes[*call]
	breaker *breaker.Breaker
	idle    *redisconn.Idle
	denials *driver.DenyCache // nil: none are remembered
	local   *ratelimit.Memory // decides while Redis cannot be asked; nil without Config.Replicas
	down    atomic.Bool       // the log was told of the outage
}

// New returns a Limiter on client, which stays the caller's to close.
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
	// A server that does not answer holds a few goroutines, not one per caller, and nobody longer than
	// they want to: only a client that heeds deadlines lets go of a caller in time.
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

// Peek returns the decision that Allow would make now, and charges nothing. Its Remaining and Reset
// are those after the charge if that would be allowed. It returns ErrUnavailable if Redis cannot be
// asked, whatever the configuration says for this case.
func (l *Limiter) Peek(ctx context.Context, charges ...ratelimit.Charge) (ratelimit.Decision, error) {
	normal, err := ratelimit.Charges(charges).Normalize()
	if err != nil {
		return ratelimit.Decision{}, err
	}
	return l.decide(ctx, 0, false, normal)
}

// Refund implements ratelimit.Limiter. It returns ErrUnavailable if Redis cannot be asked, whatever
// the configuration says for this case; what was counted within the process is given back there.
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

// Reset forgets what was charged to the limits and keys of the charges, in this window and the one
// before. Other processes may deny for a second more; see Config.DenyCache.
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

// observed decides, within the process if Redis cannot be asked, and records the decision.
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

// decide asks the script and works out the details from the state that it saw, with the arithmetic
// that all limiters share. The charges are normalized.
func (l *Limiter) decide(ctx context.Context, within time.Duration, take bool, charges []ratelimit.Charge) (d ratelimit.Decision, err error) {
	possible := !slices.ContainsFunc(charges, tooMuch)
	c := &call{script: l.decideScript, many: true, charges: charges, take: take && possible, within: within.Milliseconds()}
	if err := l.run(ctx, c); err != nil {
		return ratelimit.Decision{}, err
	}
	var space [3]driver.Counter // most decisions need no more
	counters := space[:0]
	for i, charge := range charges {
		sane := int64(1<<53) / charge.Limit.Window.Milliseconds() // whatever a foreign value says
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

// run has a call answered unless Redis is known not to answer. Its error is ErrUnavailable or that of
// ctx.
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
		if time.Since(start) >= silence { // the next caller shall not take the next silent connection
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

// unanswered has the idle connections tested, and the nodes of a cluster asked for.
func (l *Limiter) unanswered(ctx context.Context, c *call, err error) {
	ctx = context.WithoutCancel(ctx) // the caller may have left
	redisconn.Failed(ctx, l.client, err)
	l.idle.Test(ctx, string(appendName(nil, c.base, c.charges[0])))
}

var errOpen = errors.New("redis has not answered lately, waiting for the next probe")

// fallBack decides while Redis cannot be asked, as Config.FailOpen and Config.Replicas say. The error
// is the cause, or that of the local limiter.
func (l *Limiter) fallBack(ctx context.Context, within time.Duration, charges []ratelimit.Charge, cause error) (ratelimit.Decision, error) {
	if !l.cfg.FailOpen && l.local == nil {
		return ratelimit.Decision{}, cause
	}
	if !l.down.Swap(true) {
		l.cfg.Logger.WarnContext(ctx, "ratelimit: store unavailable, requests are decided without it",
			slog.Bool("counted", l.local != nil), slog.Any("error", cause))
	}
	if l.local == nil {
		return ratelimit.Decision{Allowed: true, Fallback: true}, nil
	}
	d, err := l.countHere(ctx, within, l.shareOf(charges))
	if d.Never && !slices.ContainsFunc(charges, tooMuch) { // too much for the share of this process, not for the limit
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
	charges = slices.Clone(charges) // a call under way may still be reading them
	for i := range charges {
		limit := &charges[i].Limit
		limit.Max = max(1, limit.Max/replicas)
		if limit.Algorithm == ratelimit.TokenBucket {
			limit.Burst = max(1, limit.Burst/replicas)
		}
	}
	return charges
}

// recovered says once that Redis answers again.
func (l *Limiter) recovered(ctx context.Context) {
	if l.down.Load() && l.down.Swap(false) {
		l.cfg.Logger.InfoContext(ctx, "ratelimit: store available again")
	}
}

// checkTimeout bounds Check, whatever the client's own timeouts are.
const checkTimeout = 5 * time.Second

// Check reports whether the server decides about several limits at once and keeps the counters, and
// whether the client lets go of a connection that falls silent. It returns nil if all is well. Else
// Unwrap() []error of the error gives the findings singly: each has the method Mend() string, unlike
// a failure to look, which takes 5 s at most. Nothing is changed but the server's script cache.
func (l *Limiter) Check(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	answer := make(chan error, 1)
	go func() { answer <- l.look(ctx) }() // the client need not mind the deadline
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
		found.Add("set ContextTimeoutEnabled of the client's options, or a ReadTimeout",
			"the client waits for ever for a connection that has fallen silent, and loses it for its pool")
	}
	refused := redis.Error(nil)
	switch err := l.rehearse(ctx); {
	case errors.As(err, &refused):
		found.Add(mendOf(refused), "the server refuses to decide: %v", refused)
	case err != nil:
		found.Join(fmt.Errorf("ratelimitredis: check: %w", err))
		return found.Err()
	}
	settings, err := l.client.ConfigGet(ctx, "maxmemory*").Result()
	// A managed server may refuse to tell. Any other failure is a failure to look.
	if err != nil && !errors.As(err, &refused) {
		found.Join(fmt.Errorf("ratelimitredis: check: %w", err))
	}
	if policy := settings["maxmemory-policy"]; settings["maxmemory"] != "0" && policy != "" && !strings.HasPrefix(policy, "noeviction") {
		found.Add("CONFIG SET maxmemory-policy noeviction", "maxmemory-policy %s may drop counters, which admits more than the limits", policy)
	}
	return found.Err()
}

// rehearse asks for a decision about limits that nobody has, and takes nothing.
func (l *Limiter) rehearse(ctx context.Context) error {
	user, global := ratelimit.Limit{Name: "check-user", Max: 1}, ratelimit.Limit{Name: "check-global", Max: 1}
	_, err := l.Peek(ctx, ratelimit.Charge{Limit: user, Key: "check"}, ratelimit.Charge{Limit: global})
	return err
}

func mendOf(refused redis.Error) string {
	if strings.HasPrefix(refused.Error(), "CROSSSLOT") {
		return "set Config.Tag: the server is part of a cluster"
	}
	return "let the user run EVALSHA and EVAL, with TIME, MGET, INCRBY, SET and DEL on keys that begin with Config.Prefix"
}

// Config configures a Limiter. The zero value works.
type Config struct {
	// Prefix begins every key: 1 to 64 of [A-Za-z0-9._:-]. Default: "rate_limit".
	Prefix string

	// Tag puts every key into the cluster slot of the hash tag {Tag}: 1 to 32 of [A-Za-z0-9._-].
	// Default: none; "rl" on a cluster or ring client, which cannot decide about several keys without
	// one.
	Tag string

	// Timeout bounds a call, whatever the client's own timeouts and retries are. With a client whose
	// ContextTimeoutEnabled is set, a call that waits for no other is made by the goroutine that
	// asks, which is faster; it then ends with the timeout or the deadline of its context, not when
	// that is cancelled. Default: 1 s, ten times the period after which a container that has used up its
	// share of the CPU runs again. What a silent Redis costs is bounded by the five failures after which
	// nobody waits for it.
	Timeout time.Duration

	// DenyCache is how many denials are remembered, at least 64: each until Redis would admit it, for
	// a second at most, so that a flood of denied requests costs one round trip a second. What is
	// remembered is denied during an outage as well. -1 remembers none. Default: 10,000.
	DenyCache int

	// FailOpen lets requests pass uncounted while Redis cannot be asked. Not together with Replicas.
	// Default: such requests get ratelimit.ErrUnavailable, which the middleware answers with 503.
	FailOpen bool

	// Replicas, if above 0, has requests counted within the process while Redis cannot be asked: with
	// every limit divided by this number of processes, but at least one unit, and without what Redis
	// has counted. A request that costs more than this share is denied until Redis can be asked.
	// Default: none is.
	Replicas int

	// Logger receives the beginning and the end of an outage that decides. Default: slog.Default().
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

// base is how the keys begin.
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

// maxLabels bounds the limits whose labels are kept ready.
const maxLabels = 1000

// meters are the instruments.
type meters struct {
	decisions metric.Int64Counter
	duration  metric.Float64Histogram
	remaining metric.Float64Histogram
	drift     metric.Int64Counter

	// labels by limit are made once, since a remembered denial is to cost little. Readers take no lock:
	// who adds a limit replaces the map.
	labels  atomic.Pointer[map[string]*labels]
	growing sync.Mutex
}

// labels are those of one limit.
type labels struct {
	allowed, denied bySource
	remaining       []metric.RecordOption
}

// bySource are the labels of a decision by who made it.
type bySource struct{ store, cache, fallback []metric.AddOption }

func newMeters(provider metric.MeterProvider) (*meters, error) {
	meter := telemetry.New(scope, nil, provider).Meter
	m := &meters{}
	m.labels.Store(&map[string]*labels{})
	var errs [4]error
	m.decisions, errs[0] = meter.Int64Counter("holdfast.ratelimit.decisions",
		metric.WithDescription("Decisions by outcome, by who decided, and by the limit that was nearest to its end."), metric.WithUnit("{decision}"))
	m.duration, errs[1] = meter.Float64Histogram("holdfast.ratelimit.duration",
		metric.WithDescription("Duration of a decision that was not remembered, or of the attempt."), metric.WithUnit("s"), telemetry.Seconds)
	m.remaining, errs[2] = meter.Float64Histogram("holdfast.ratelimit.remaining",
		metric.WithDescription("Share that is left of the limit that was nearest to its end."), metric.WithUnit("1"),
		metric.WithExplicitBucketBoundaries(0, 0.05, 0.1, 0.2, 0.5, 0.8))
	m.drift, errs[3] = meter.Int64Counter("holdfast.ratelimit.drift",
		metric.WithDescription("Questions asked again because the server was in another window."), metric.WithUnit("{question}"))
	return m, errors.Join(errs[:]...)
}

// decided counts a decision, and records the share that is left of the limit nearest to its end.
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

// unavailable counts a request that got no decision.
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
