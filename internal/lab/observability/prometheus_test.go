package observability

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/internal/lab/shop"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// A real Prometheus scrapes the shop under load, takes the rules, and has data for every panel of what is well.
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

// observe has a Prometheus scrape a shop under load until it has data for the queries of the dashboard that are served and not
// rare, and has evaluated each rule.
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
	for _, r := range readRules(t) { // what is wrong with an expression may show only where there is data
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

// evaluate evaluates an expression of the dashboard, and returns how many series come of it. Its rates look back over the
// whole test, however long the machine takes for it.
func (p prometheusAPI) evaluate(expr string) (results int, err error) {
	p.t.Helper()
	expr = strings.NewReplacer("$job", ".*", "$instance", ".*", "$__rate_interval", "10m").Replace(expr)
	var data struct{ Result []json.RawMessage }
	if err := p.get("/api/v1/query?query="+url.QueryEscape(expr), &data); err != nil {
		return 0, fmt.Errorf("%w in %s", err, expr)
	}
	return len(data.Result), nil
}

// rulesAreWell reports an error until Prometheus has evaluated all rules.
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
