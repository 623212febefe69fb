package observability

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/internal/lab/shop"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// A real Prometheus scrapes the shop under load, accepts the rules, and has data for every panel of a healthy shop.
func TestPrometheus(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "a real Prometheus, which is installed for the night")
	t.Run("in memory", func(t *testing.T) {
		t.Parallel()
		api := observe(t, startShop(t, nil).URL(), func(expr string) bool { return !ofServers.MatchString(expr) })
		for _, r := range readRules(t) {
			testenv.Eventually(t, func() error {
				results, err := api.evaluate(r.Expr)
				if err == nil && results > 0 {
					err = fmt.Errorf("%s is about to fire in a shop that is well", r.Alert)
				}
				return err
			})
		}
	})
	t.Run("on servers", func(t *testing.T) {
		t.Parallel()
		observe(t, startShop(t, shop.Shared(t).Env(), "-backend=services").URL(), func(string) bool { return true })
	})
}

// observe lets a Prometheus scrape a shop under load until it has data for all queries of the dashboard that are served and
// not rare, and has evaluated each rule.
func observe(t *testing.T, address string, served func(expr string) bool) prometheusAPI {
	t.Helper()
	api := scrape(t, address)
	go load(t.Context(), address)
	for _, panel := range readDashboard(t).Panels {
		for _, q := range panel.Targets {
			testenv.Eventually(t, func() error {
				results, err := api.evaluate(q.Expr)
				if err == nil && results == 0 && served(q.Expr) && !rare.MatchString(q.Expr) {
					err = fmt.Errorf("%s: no data for %s", panel.Title, q.Expr)
				}
				return err
			})
		}
	}
	for _, r := range readRules(t) { // some errors in expressions only show with data
		if _, err := api.evaluate(r.Expr); err != nil {
			t.Errorf("alert %s: %v", r.Alert, err)
		}
	}
	testenv.Eventually(t, api.rulesAreWell)
	return api
}

// scrape starts a Prometheus with our rules that scrapes a shop.
func scrape(t *testing.T, address string) prometheusAPI {
	t.Helper()
	rules, err := filepath.Abs(filepath.Join(folder, "rules.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	p := testenv.Private(t, testenv.Prometheus,
		"global: {scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 1s}",
		fmt.Sprintf("rule_files: [%q]", rules),
		"scrape_configs:",
		fmt.Sprintf("  - {job_name: shop, static_configs: [{targets: [%q]}]}", strings.TrimPrefix(address, "http://")))
	return prometheusAPI{t, p.URL()}
}

// prometheusAPI is the HTTP API of a Prometheus.
type prometheusAPI struct {
	t   *testing.T
	url string
}

// evaluate evaluates an expression of the dashboard, and returns the number of series. Its rates cover the whole test,
// because the machine may be slow.
func (p prometheusAPI) evaluate(expr string) (results int, err error) {
	p.t.Helper()
	expr = strings.NewReplacer("$job", ".*", "$instance", ".*", "$__rate_interval", "10m").Replace(expr)
	var data struct{ Result []json.RawMessage }
	if err := p.get("/api/v1/query?query="+url.QueryEscape(expr), &data); err != nil {
		return 0, fmt.Errorf("%w in %s", err, expr)
	}
	return len(data.Result), nil
}

// rulesAreWell returns an error until Prometheus has evaluated all rules.
func (p prometheusAPI) rulesAreWell() error {
	p.t.Helper()
	var data struct {
		Groups []struct {
			Rules []struct{ Name, Health, LastError string }
		}
	}
	if err := p.get("/api/v1/rules", &data); err != nil {
		return err
	}
	loaded := 0
	for _, g := range data.Groups {
		for _, r := range g.Rules {
			if loaded++; r.Health != "ok" {
				return fmt.Errorf("rule %s is %s: %s", r.Name, r.Health, r.LastError)
			}
		}
	}
	if want := len(readRules(p.t)); loaded != want {
		return fmt.Errorf("Prometheus has %d rules, want %d", loaded, want)
	}
	return nil
}

func (p prometheusAPI) get(path string, data any) error {
	p.t.Helper()
	req, err := http.NewRequestWithContext(p.t.Context(), http.MethodGet, p.url+path, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	answer := struct {
		Error string
		Data  any
	}{Data: data}
	if err := json.NewDecoder(io.LimitReader(resp.Body, 1<<20)).Decode(&answer); err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", resp.Status, answer.Error)
	}
	return nil
}

func writeFile(t *testing.T, path string, text []byte) {
	t.Helper()
	if err := os.WriteFile(path, text, 0o644); err != nil {
		t.Fatal(err)
	}
}

// found returns the captures of the only match of an expression in a manifest of the shop.
func found(t *testing.T, manifest, expression string) []string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("../../../examples/reservation/deploy", manifest))
	if err != nil {
		t.Fatal(err)
	}
	all := regexp.MustCompile(expression).FindAllStringSubmatch(string(text), -1)
	if len(all) != 1 {
		t.Fatalf("%s has %d matches of %s", manifest, len(all), expression)
	}
	return all[0][1:]
}

// quoted quotes a text for YAML in single quotes, where only the quotes need escaping.
func quoted(text string) string { return "'" + strings.ReplaceAll(text, "'", "''") + "'" }

// The autoscaler of the relays reads the metric that the adapter provides. If several relays report the same lag, the
// adapter returns that lag once, for the requested namespace.
func TestAutoscaler_readsTheLag(t *testing.T) {
	t.Parallel()
	// The type AverageValue would divide the metric by the number of pods.
	metric := found(t, "kubernetes.yaml", `metric: \{name: (\w+)\}\s+target: \{type: Value, value: "\d+"\}`)[0]
	rule := found(t, "prometheus-adapter.yaml",
		`seriesQuery: '(\w+)\{namespace!=""\}'\s+resources: \{overrides: \{namespace: \{resource: namespace\}\}\}\s+metricsQuery: '([^']*)'`)
	if rule[0] != metric {
		t.Errorf("the autoscaler reads %q, the adapter has %q", metric, rule[0])
	}
	if !strings.HasPrefix(rule[1], "max(") {
		t.Errorf("%s grows with each relay", rule[1])
	}
	query := strings.NewReplacer("<<.Series>>", metric, "<<.LabelMatchers>>", `namespace="shop"`).Replace(rule[1])
	for _, relays := range []int{1, 2, 8} {
		t.Run(fmt.Sprint(relays, " relays"), func(t *testing.T) {
			var b strings.Builder
			b.WriteString("tests:\n  - interval: 1m\n    input_series:\n")
			for i := range relays {
				fmt.Fprintf(&b, "      - {series: %s, values: '0 5 5'}\n", quoted(fmt.Sprintf(`%s{namespace="shop",pod="relay-%d"}`, metric, i)))
			}
			fmt.Fprintf(&b, "      - {series: %s, values: '0 60 60'}\n", quoted(metric+`{namespace="other",pod="relay-0"}`))
			fmt.Fprintf(&b, "    promql_expr_test:\n      - expr: %s\n        eval_time: 2m\n        exp_samples: [{labels: '{}', value: 5}]\n", quoted(query))
			dir := t.TempDir()
			writeFile(t, filepath.Join(dir, "lag_test.yaml"), []byte(b.String()))
			if out, err := promtool(t, dir, "test", "rules", "lag_test.yaml"); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}

// books returns an inbox whose handlers succeed, fail for good, fail at first, or take too long, depending on the message's
// name.
func (p parts) books() *inboxpgx.Store {
	p.t.Helper()
	books, err := inboxtest.New(p.manager(), "billing", inboxpgx.Config{MeterProvider: p.meters})
	if err != nil {
		p.t.Fatal(err)
	}
	for name, handle := range map[string]func() error{
		"good": func() error { return nil },
		"weak": func() error { return errDown },
		"bad":  func() error { return inbox.Unrecoverable(errDown) },
		"slow": func() error { time.Sleep(time.Minute); return nil },
	} {
		err := inboxpgx.Handle(books, name, func(context.Context, pgx.Tx, int) error { return handle() })
		if err != nil {
			p.t.Fatal(err)
		}
	}
	return books
}

func (p parts) consumerConfig() inbox.ConsumerConfig {
	return inbox.ConsumerConfig{HandlerTimeout: 10 * time.Second, MeterProvider: p.meters, Logger: p.log}
}

// consumer settles messages in every way. All are delivered twice.
func (p parts) consumer(known exported) {
	p.consume(known, inboxtest.Queue{Fault: inboxtest.DeliverTwice}, p.consumerConfig(), "good", "weak", "bad", "slow")
}

// orderedConsumer makes a key wait behind its dead letter.
func (p parts) orderedConsumer(known exported) {
	cfg := p.consumerConfig()
	cfg.Ordered, cfg.ParkKeys = true, true
	p.consume(known, inboxtest.Queue{}, cfg, "bad", "good")
}

func (p parts) consume(known exported, queue inboxtest.Queue, cfg inbox.ConsumerConfig, names ...string) {
	p.t.Helper()
	broker := inboxtest.NewBroker()
	consumer, err := inboxtest.NewConsumer(broker, queue, p.books(), cfg)
	if err != nil {
		p.t.Fatal(err)
	}
	stop := p.background(consumer.Run)
	for _, name := range names {
		m := &inbox.Message{ID: uuid.Must(uuid.NewV7()), Name: name, Key: "a", Body: []byte("1")}
		if err := broker.Send(p.t.Context(), m); err != nil {
			p.t.Fatal(err)
		}
	}
	for range 20 { // dead letters are counted only while the gauge is read
		time.Sleep(5 * time.Second)
		known.gather(p.t, p.registry)
	}
	stop()
}

// Consumers of one queue report on their own. The messages in flight of consumers with one name are added.
func TestConsumers_ofOneQueue(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newParts(t)
		var stops []func()
		for i, name := range []string{"billing", "mail", "mail"} {
			cfg := p.consumerConfig()
			cfg.Name, cfg.HandlerTimeout = name, time.Hour
			broker := inboxtest.NewBroker()
			mux := inbox.NewMux()
			err := mux.Register("slow", func(ctx context.Context, _ *inbox.Message) error { <-ctx.Done(); return ctx.Err() })
			if err != nil {
				t.Fatal(err)
			}
			consumer, err := inboxtest.NewConsumer(broker, inboxtest.Queue{Name: "orders"}, mux, cfg)
			if err != nil {
				t.Fatal(err)
			}
			for range i + 1 {
				err := broker.Send(t.Context(), &inbox.Message{ID: uuid.Must(uuid.NewV7()), Name: "slow", Body: []byte("1")})
				if err != nil {
					t.Fatal(err)
				}
			}
			stops = append(stops, p.background(consumer.Run))
		}
		time.Sleep(time.Second)
		check := func(want map[string]float64) {
			t.Helper()
			if got := p.gauge("holdfast_inbox_test_in_hand", "consumer"); !maps.Equal(got, want) {
				t.Errorf("%v in flight, want %v", got, want)
			}
		}
		check(map[string]float64{"billing": 1, "mail": 5})
		stops[2]()
		check(map[string]float64{"billing": 1, "mail": 2})
		stops[1]()
		check(map[string]float64{"billing": 1})
		stops[0]()
	})
}

// gauge returns the values of a gauge of Prometheus by one of its labels.
func (p parts) gauge(name, label string) map[string]float64 {
	p.t.Helper()
	families, err := p.registry.Gather()
	if err != nil {
		p.t.Fatal(err)
	}
	values := map[string]float64{}
	for _, family := range families {
		if family.GetName() != name {
			continue
		}
		for _, m := range family.GetMetric() {
			for _, l := range m.GetLabel() {
				if l.GetName() == label {
					values[l.GetValue()] += m.GetGauge().GetValue()
				}
			}
		}
	}
	return values
}

func (p parts) amqpConsumer() func(context.Context) error {
	consumer, err := inboxamqp.NewConsumer(noRabbitMQ, inboxamqp.Queue{Name: "billing"}, p.books(), p.consumerConfig())
	if err != nil {
		p.t.Fatal(err)
	}
	return consumer.Run
}

func (p parts) redisConsumer(client *redis.Client) func(context.Context) error {
	consumer, err := inboxredis.NewConsumer(client, inboxredis.Stream{}, p.books(), p.consumerConfig())
	if err != nil {
		p.t.Fatal(err)
	}
	return consumer.Run
}

// startShop starts a shop with short holds.
func startShop(t *testing.T, env []string, flags ...string) *shop.Process {
	t.Helper()
	return shop.Start(t, env, append([]string{"-hold=1s", "-sweep=@every 1s", "-user-limit=20"}, flags...)...)
}

// load makes users hold seats, each request twice, until ctx ends. Unconfirmed holds expire.
func load(ctx context.Context, address string) {
	client := &http.Client{Timeout: time.Minute}
	defer client.CloseIdleConnections()
	post := func(user, path, body string) (answer []byte) {
		key := string(idempotency.NewKey())
		for range 2 {
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, address+path, strings.NewReader(body))
			if err != nil {
				return nil
			}
			req.Header.Set("X-Mock-User-Id", user)
			req.Header.Set("Idempotency-Key", key)
			req.Header.Set("Content-Type", "application/json")
			resp, err := client.Do(req)
			if err != nil {
				return nil
			}
			answer, _ = io.ReadAll(resp.Body) // a partial answer counts as none
			_ = resp.Body.Close()
		}
		return answer
	}
	rest := func() {
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
		}
	}
	for user := 0; ctx.Err() == nil; user++ {
		rest()
		var event struct{ ID string }
		name := fmt.Sprint("user-", user)
		if json.Unmarshal(post(name, "/api/events", `{"name":"Concert","seats":50}`), &event) != nil {
			continue
		}
		for range 15 {
			post(name, "/api/reservations", `{"event_id":"`+event.ID+`","quantity":1}`)
			rest()
		}
	}
}
