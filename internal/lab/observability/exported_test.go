package observability

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/redis/go-redis/v9"
	otelprometheus "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/metric"
	sdk "go.opentelemetry.io/otel/sdk/metric"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/expirytest"
	"github.com/holdfast-go/holdfast/idempotency"
	idempotencydriver "github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/internal/pgprune"
	"github.com/holdfast-go/holdfast/outbox"
	outboxdriver "github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimittest"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// exported has the metrics of the code as Prometheus sees them: metric, label, values.
type exported map[string]map[string]map[string]bool

// parts holds the providers and loggers of the exercises.
type parts struct {
	t        *testing.T
	registry *prometheus.Registry
	meters   metric.MeterProvider
	log      *slog.Logger
}

// exercise runs every package on its fakes, with successes and failures, and returns the exported metrics.
func exercise(t *testing.T) exported {
	t.Helper()
	known := exported{}
	synctest.Test(t, func(t *testing.T) {
		p := newParts(t)
		for _, run := range []func(known exported){
			p.transactions, p.relay, p.consumer, p.orderedConsumer, p.brokers, p.requests, p.limits, p.leases, p.sweeps, p.upkeep,
		} {
			run(known)
			known.gather(t, p.registry)
		}
	})
	return known
}

// newParts exports metrics to a registry until the test ends.
func newParts(t *testing.T) parts {
	t.Helper()
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	exporter, err := otelprometheus.New(otelprometheus.WithRegisterer(registry))
	if err != nil {
		t.Fatal(err)
	}
	provider := sdk.NewMeterProvider(sdk.WithReader(exporter))
	t.Cleanup(func() {
		if err := provider.Shutdown(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return parts{t: t, registry: registry, meters: zeroed{provider}, log: slog.New(slog.DiscardHandler)}
}

// gather adds the contents of the registry.
func (e exported) gather(t *testing.T, registry *prometheus.Registry) {
	t.Helper()
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range families {
		names := []string{family.GetName()}
		if family.GetType().String() == "HISTOGRAM" {
			names = []string{family.GetName() + "_bucket", family.GetName() + "_sum", family.GetName() + "_count"}
		}
		for _, name := range names {
			if e[name] == nil {
				e[name] = map[string]map[string]bool{}
			}
			for _, m := range family.GetMetric() {
				for _, label := range m.GetLabel() {
					if e[name][label.GetName()] == nil {
						e[name][label.GetName()] = map[string]bool{}
					}
					e[name][label.GetName()][label.GetValue()] = true
				}
			}
		}
	}
}

// zeroed exports counters from the start, so that the names of unused counters are known, too.
type zeroed struct{ metric.MeterProvider }

func (z zeroed) Meter(name string, opts ...metric.MeterOption) metric.Meter {
	return zeroedMeter{z.MeterProvider.Meter(name, opts...)}
}

type zeroedMeter struct{ metric.Meter }

func (z zeroedMeter) Int64Counter(name string, opts ...metric.Int64CounterOption) (metric.Int64Counter, error) {
	counter, err := z.Meter.Int64Counter(name, opts...)
	if err == nil {
		counter.Add(context.Background(), 0)
	}
	return counter, err
}

var errDown = errors.New("down")

// background runs a service until the returned function is called.
func (p parts) background(run func(context.Context) error) (stop func()) {
	p.t.Helper()
	ctx, cancel := context.WithCancel(p.t.Context())
	ended := make(chan error, 1)
	go func() { ended <- run(ctx) }()
	return func() {
		p.t.Helper()
		cancel()
		if err := <-ended; err != nil {
			p.t.Error(err)
		}
	}
}

func (p parts) manager(script ...txretrytest.Fault) txretry.Transactor {
	return txretrytest.New(txretrytest.Config{Script: script, Retry: txretry.Config{MeterProvider: p.meters, Logger: p.log}})
}

// transactions commit, are retried, fail, and end with an unknown outcome.
func (p parts) transactions(known exported) {
	m := p.manager(txretrytest.Fault{Point: txretrytest.AtCommit, SQLSTATE: "40001"}, txretrytest.Fault{},
		txretrytest.Fault{Point: txretrytest.AtCommit, SQLSTATE: "08006"})
	work := func(context.Context, pgx.Tx) error { return nil }
	for _, fn := range []func(context.Context, pgx.Tx) error{work, work, func(context.Context, pgx.Tx) error { return errDown }} {
		_ = m.DoWith(p.t.Context(), txretry.Options{Name: "order"}, fn) // the metrics have the result
	}
	p.overBudget(known)
}

// overBudget has a call refused by the retry budget.
func (p parts) overBudget(known exported) {
	cfg := txretry.Config{RetryBudget: 0.5, MaxAttempts: 1, MeterProvider: p.meters, Logger: p.log}
	m := txretrytest.New(txretrytest.Config{Retry: cfg})
	conflict := func(context.Context, pgx.Tx) error { return &pgconn.PgError{Code: "40001"} }
	for range 10 {
		_ = m.Do(p.t.Context(), conflict) // the metrics have the result
	}
	err := m.Do(p.t.Context(), func(context.Context, pgx.Tx) error {
		return m.DoWith(p.t.Context(), txretry.Options{Name: "order"}, conflict)
	})
	if _, refused := errors.AsType[*txretry.LockTimeoutError](err); !refused {
		p.t.Error(err)
	}
	known.gather(p.t, p.registry) // the share is observed while it is high
}

// windowed is a publisher with a window.
type windowed struct{ *outboxtest.Publisher }

func (windowed) Window() (used, size int) { return 1, 10 }

// losing is a store that settles, and reports that the leases were lost before.
type losing struct{ *outboxtest.Store }

func (l losing) Settle(ctx context.Context, b outboxdriver.Batch, settlements []outboxdriver.Settlement) (outboxdriver.Settled, error) {
	settled, err := l.Store.Settle(ctx, b, settlements)
	settled.Stale = b.Leases
	return settled, err
}

// relay publishes a message, dead-letters one, and loses its broker and its leases.
func (p parts) relay(known exported) {
	store, publisher := outboxtest.New(), outboxtest.NewPublisher()
	publisher.Respond(func(m outboxdriver.Message) error {
		switch m.Name {
		case "bad":
			return &outboxdriver.PublishError{Class: outboxdriver.Permanent, Err: errDown}
		case "late":
			return &outboxdriver.PublishError{Class: outboxdriver.Unavailable, Err: errDown}
		}
		return nil
	})
	relay, err := outbox.NewRelay(losing{store}, windowed{publisher}, outbox.RelayConfig{MeterProvider: p.meters, Logger: p.log})
	if err != nil {
		p.t.Fatal(err)
	}
	stop := p.background(relay.Run)
	for _, name := range []string{"good", "bad", "late"} {
		m, err := outbox.NewMessage(name, 1)
		if err == nil {
			err = p.manager().Do(p.t.Context(), func(ctx context.Context, tx pgx.Tx) error { return store.Write(ctx, tx, m) })
		}
		if err != nil {
			p.t.Fatal(err)
		}
		time.Sleep(10 * time.Second)
	}
	known.gather(p.t, p.registry)
	stop()
}

// brokers exports the metrics of consumers whose brokers are unreachable.
func (p parts) brokers(known exported) {
	client, closeClient := noRedis()
	defer closeClient()
	for _, run := range []func(context.Context) error{p.amqpConsumer(), p.redisConsumer(client)} {
		stop := p.background(run)
		time.Sleep(time.Minute)
		known.gather(p.t, p.registry)
		stop()
	}
}

// noRedis is a client of an unreachable server.
func noRedis() (client *redis.Client, closeIt func()) {
	client = redis.NewClient(&redis.Options{
		Addr: "127.0.0.1:1", ContextTimeoutEnabled: true, MaxRetries: -1,
		Dialer: func(context.Context, string, string) (net.Conn, error) { return nil, errDown },
	})
	return client, func() {
		_ = client.Close()      // it has no connection
		time.Sleep(time.Minute) // until its pool ends
	}
}

func noRabbitMQ(context.Context) (*amqp.Connection, error) { return nil, errDown }

// failing is a store of keys that fails at one step.
type failing struct {
	*idempotencytest.Store
	begin, complete error
	behind          idempotencydriver.Store
}

func (f failing) Begin(ctx context.Context, c idempotencydriver.Claim) (idempotencydriver.BeginResult, error) {
	if f.begin != nil {
		return idempotencydriver.BeginResult{}, f.begin
	}
	return f.Store.Begin(ctx, c)
}

func (f failing) Complete(ctx context.Context, c idempotencydriver.Claim, r idempotencydriver.Response) error {
	if f.complete != nil {
		return f.complete
	}
	return f.Store.Complete(ctx, c, r)
}

func (f failing) Fallback() idempotencydriver.Store { return f.behind }

// requests run, are replayed and rejected, and lose their results.
func (p parts) requests(exported) {
	well := idempotencytest.NewStore()
	for _, store := range []idempotencydriver.Store{
		well, well,
		failing{Store: well, begin: errDown},
		failing{Store: well, begin: errDown, behind: idempotencytest.NewStore()},
		failing{Store: idempotencytest.NewStore(), complete: errDown},
		failing{Store: idempotencytest.NewStore(), complete: idempotency.ErrLeaseLost},
	} {
		once, err := idempotency.NewMiddleware(store, func(*http.Request) (string, error) { return "tenant", nil },
			idempotency.MiddlewareConfig{MeterProvider: p.meters, Logger: p.log})
		if err != nil {
			p.t.Fatal(err)
		}
		r := httptest.NewRequest(http.MethodPost, "/", strings.NewReader("{}"))
		r.Header.Set("Idempotency-Key", "0123456789ab4cde8f0123456789abcd")
		once(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusCreated) })).
			ServeHTTP(httptest.NewRecorder(), r)
		time.Sleep(time.Minute) // until background retries end
	}
}

// limits allow, deny, and cannot reach Redis.
func (p parts) limits(exported) {
	denying := ratelimittest.New()
	denying.Deny("user", time.Second)
	client, closeClient := noRedis()
	defer closeClient()
	for _, limiter := range []ratelimit.Limiter{ratelimittest.New(), denying, p.limiter(client, 1), p.limiter(client, 0)} {
		charges := func(*http.Request) ([]ratelimit.Charge, error) {
			return []ratelimit.Charge{{Limit: ratelimit.Limit{Name: "user", Max: 10}, Key: "a"}}, nil
		}
		limited, err := ratelimit.NewMiddleware(limiter, charges, ratelimit.MiddlewareConfig{MeterProvider: p.meters, Logger: p.log})
		if err != nil {
			p.t.Fatal(err)
		}
		limited(http.NotFoundHandler()).ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodPost, "/", nil))
	}
}

// leases hold units of a busy limit.
func (p parts) leases(known exported) {
	leased, err := ratelimit.NewLeased(ratelimittest.New(), ratelimit.LeasedConfig{MeterProvider: p.meters})
	if err != nil {
		p.t.Fatal(err)
	}
	stop := p.background(leased.Run)
	synctest.Wait()
	for range 10 {
		if _, err := leased.Allow(p.t.Context(), ratelimit.Charge{Limit: ratelimit.Limit{Name: "all", Max: 1000, Window: time.Minute}}); err != nil {
			p.t.Fatal(err)
		}
	}
	known.gather(p.t, p.registry)
	stop()
}

// limiter uses an unreachable Redis.
func (p parts) limiter(client *redis.Client, replicas int) ratelimit.Limiter {
	l, err := ratelimitredis.New(client, ratelimitredis.Config{Replicas: replicas, MeterProvider: p.meters, Logger: p.log})
	if err != nil {
		p.t.Fatal(err)
	}
	return l
}

// sweeps expire a row, and quarantine another.
func (p parts) sweeps(known exported) {
	tx := p.manager()
	var store *expirytest.Store
	store, err := expirytest.New(tx, expirytest.Config{Emit: func(_ context.Context, _ pgx.Tx, rows []expiry.Row) error {
		for _, row := range rows {
			if row.ID == "bad" {
				return errDown
			}
		}
		return nil
	}})
	if err != nil {
		p.t.Fatal(err)
	}
	sweeper, err := expiry.NewSweeper(store, expiry.SweeperConfig{Schedule: "@every 1s", MeterProvider: p.meters, Logger: p.log})
	if err != nil {
		p.t.Fatal(err)
	}
	for _, id := range []string{"good", "bad"} {
		err := tx.Do(p.t.Context(), func(_ context.Context, tx pgx.Tx) error { return store.Put(tx, id, time.Now(), "held") })
		if err != nil {
			p.t.Fatal(err)
		}
	}
	stop := p.background(sweeper.Run)
	time.Sleep(time.Minute)
	known.gather(p.t, p.registry)
	stop()
}

// upkeep runs the pruners of the stores in Postgres.
func (p parts) upkeep(exported) {
	for _, core := range []string{"outbox", "inbox", "idempotency"} {
		if _, err := pgprune.New(pgprune.Config{Core: core, MeterProvider: p.meters, Logger: p.log}); err != nil {
			p.t.Fatal(err)
		}
	}
}

// ofPrometheus are the labels that a scrape adds, and the label of buckets.
var ofPrometheus = []string{"job", "instance", "le"}

// The code exports every metric, label and value that the dashboard, the rules, their tests and the documents name.
func TestNames(t *testing.T) {
	t.Parallel()
	known := exercise(t)
	for where, expr := range everyExpr(t) {
		for _, problem := range known.problems(expr) {
			t.Errorf("%s: %s in %s", where, problem, expr)
		}
	}
	for _, test := range readRuleTests(t) {
		for _, s := range test.InputSeries {
			for _, problem := range known.misnamed(s.Series) {
				t.Errorf("example %q: %s in %s", test.Name, problem, s.Series)
			}
		}
	}
	checkDocuments(t, known)
}

// problems returns the names in an expression that are not exported.
func (e exported) problems(expr string) []string {
	var found []string
	grouped := map[string]bool{}
	for _, u := range usesOf(expr) {
		if u.metric == "up" {
			continue
		}
		metrics := e.named(u.metric)
		if len(metrics) == 0 {
			found = append(found, "nothing exports "+u.metric)
		}
		for _, values := range metrics {
			for label := range values {
				grouped[label] = true
			}
		}
		if len(metrics) > 0 {
			found = append(found, u.missing(metrics)...)
		}
	}
	for _, label := range groupsOf(expr) {
		if len(grouped) > 0 && !grouped[label] && !slices.Contains(ofPrometheus, label) {
			found = append(found, "no metric has the label "+label)
		}
	}
	return found
}

// transport is the part of the metric names that depends on the transport. One engine exports the metrics of all.
var transport = regexp.MustCompile(`^holdfast_inbox_(amqp|redis)_`)

// misnamed returns the names in a series that are not exported. Sample values are not checked.
func (e exported) misnamed(series string) []string {
	for _, u := range usesOf(series) {
		for label := range u.labels {
			u.labels[label] = nil
		}
		if metrics := e.named(transport.ReplaceAllString(u.metric, "holdfast_inbox_.+_")); len(metrics) > 0 {
			return u.missing(metrics)
		}
		if u.metric != "up" {
			return []string{"nothing exports " + u.metric}
		}
	}
	return nil
}

// missing returns the labels and values that none of the metrics has.
func (u use) missing(metrics []map[string]map[string]bool) []string {
	var found []string
	for label, values := range u.labels {
		if slices.Contains(ofPrometheus, label) {
			continue
		}
		seen := map[string]bool{}
		has := false
		for _, m := range metrics {
			for value := range m[label] {
				has, seen[value] = true, true
			}
		}
		if !has {
			found = append(found, u.metric+" has no label "+label)
			continue
		}
		for _, value := range values {
			if !seen[value] {
				found = append(found, fmt.Sprintf("%s has no %s=%q", u.metric, label, value))
			}
		}
	}
	return found
}

// named returns the metrics with a name, or a name that matches a pattern.
func (e exported) named(pattern string) []map[string]map[string]bool {
	var found []map[string]map[string]bool
	whole := regexp.MustCompile("^(?:" + pattern + ")$")
	for name, labels := range e {
		if whole.MatchString(name) {
			found = append(found, labels)
		}
	}
	return found
}
