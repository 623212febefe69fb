package main

import (
	"net/http"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/httpapi"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/web"
)

// withShopPage serves the shop's own page before its API.
func (f *front) withShopPage(cfg config, b *backend, api http.Handler) http.Handler {
	if !cfg.page || !cfg.hasAPI() {
		return api
	}
	operator := ""
	if f.page != nil && cfg.opsAddr == "" {
		operator = pagePath
	}
	user, global := httpapi.Limits(cfg.userLimit, cfg.globalLimit)
	f.shopPage = must(web.New(web.Config{
		API: api, Flow: b.flow, Backlog: b.backlog, Trials: b.trials, Servers: b.outages,
		Limits:   web.Limits{Limiter: b.limiter, User: user, Global: global},
		Operator: operator,
	}))
	return f.shopPage
}
