package main

import (
	"fmt"
	"slices"
	"testing"

	"github.com/holdfast-go/holdfast/internal/lab/shop"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// What a shop on real servers reports when one of them is away, or the shop itself, raises the alerts that say so. They
// are pending, since none of the outages lasts as long as they wait.
func TestOutages(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "takes each server away under a real Prometheus")
	servers := shop.Shared(t)
	database, redis, broker := testenv.NewProxy(t, servers.Database), testenv.NewProxy(t, servers.Redis), testenv.NewProxy(t, servers.Broker)
	s := startShop(t, shop.Servers{Database: database.URL(), Redis: redis.URL(), Broker: broker.URL()}.Env(), "-backend=services")
	api := scrape(t, s.URL())
	go load(t.Context(), s.URL())
	testenv.Eventually(t, func() error {
		flowing, err := api.query(`holdfast_outbox_published_total > 0 and on () holdfast_inbox_amqp_settled_total > 0`)
		if err == nil && flowing == 0 {
			err = fmt.Errorf("no message was published and processed")
		}
		return err
	})

	broker.Cut()
	api.raised("HoldfastTransportPaused", "HoldfastConsumerDisconnected")
	broker.Heal()
	api.over("HoldfastTransportPaused")

	redis.Cut()
	api.raised("HoldfastLimiterFallback")
	redis.Heal()

	database.Cut()
	api.raised("HoldfastRelayAbsent")
	database.Heal()
	api.over("HoldfastRelayAbsent")

	s.Kill()
	api.raised("HoldfastTargetDown", "HoldfastRelayAbsent", "HoldfastConsumerAbsent", "HoldfastSweeperAbsent")
}

// raised waits until the alerts are there, with what they say.
func (p prometheusAPI) raised(names ...string) {
	p.t.Helper()
	for _, name := range names {
		testenv.Eventually(p.t, func() error {
			all, err := p.alerts()
			if err != nil {
				return err
			}
			at := slices.IndexFunc(all, func(a raisedAlert) bool { return a.Labels["alertname"] == name })
			if at < 0 {
				return fmt.Errorf("%s is not raised", name)
			}
			if url := all[at].Annotations["runbook_url"]; url != runbooks+"/"+name+".md" || all[at].Labels["job"] != "shop" {
				return fmt.Errorf("%s has the labels %v and the runbook %s", name, all[at].Labels, url)
			}
			return nil
		})
	}
}

// over waits until an alert is there no more.
func (p prometheusAPI) over(name string) {
	p.t.Helper()
	testenv.Eventually(p.t, func() error {
		all, err := p.alerts()
		if err == nil && slices.ContainsFunc(all, func(a raisedAlert) bool { return a.Labels["alertname"] == name }) {
			err = fmt.Errorf("%s is still raised", name)
		}
		return err
	})
}

// raisedAlert is an alert that is pending or fires.
type raisedAlert struct{ Labels, Annotations map[string]string }

func (p prometheusAPI) alerts() ([]raisedAlert, error) {
	p.t.Helper()
	var data struct{ Alerts []raisedAlert }
	err := p.get("/api/v1/alerts", &data)
	return data.Alerts, err
}
