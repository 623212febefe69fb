package main

import (
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/httpapi"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/memory"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/messages"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/postgres"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/command"
	"github.com/holdfast-go/holdfast/modules/operator/page"
	"github.com/holdfast-go/holdfast/ratelimit"
)

// operate runs a command of an operator and returns the exit code.
func operate(ctx context.Context, cfg config, stdout, stderr io.Writer) int {
	servers, err := newServers(cfg)
	if err != nil {
		fmt.Fprintln(stderr, "reservation: "+oneLine(err))
		return exitFailed
	}
	defer servers.close()
	return command.Run(ctx, newParts(cfg, servers).operator(cfg), cfg.command, stdout, stderr)
}

// operator lists all parts of the shop for an operator.
func (p *parts) operator(cfg config) operator.Config {
	return operator.Config{
		Program:   "reservation",
		Outboxes:  []operator.Outbox{{Store: p.messages, Relay: p.relay}},
		Consumers: []operator.Consumer{{Name: messages.Queue, Consumer: p.broker.consumer, Inbox: p.inbox}},
		Sweeps:    []operator.Sweep{{Name: "holds", Store: p.holds, Sweeper: p.sweeper}},
		Limiters:  limiters(cfg, p.limiter),
		Parts: []operator.Part{
			{Name: "shop", Part: shopTables{p}},
			{Name: "transactions", Part: p.transactor},
			{Name: "idempotency", Part: p.once},
			{Name: "idempotency.gate", Part: p.gate},
			{Name: "publisher", Part: p.broker.publisher},
		},
		Servers: p.servers.pings(),
		Log:     p.log,
		History: p.history,
	}
}

// memoryOperator lists the parts of a shop in memory.
func memoryOperator(cfg config, p *memory.Parts) operator.Config {
	return operator.Config{
		Program:   "reservation",
		Outboxes:  []operator.Outbox{{Store: p.Outbox, Relay: p.Relay}},
		Consumers: []operator.Consumer{{Name: messages.Queue, Consumer: p.Consumer, Inbox: p.Inbox}},
		Sweeps:    []operator.Sweep{{Name: "holds", Store: p.Holds, Sweeper: p.Sweeper}},
		Limiters:  limiters(cfg, p.Limiter),
		Parts:     []operator.Part{{Name: "idempotency", Part: p.Keys}},
		Log:       &operator.MemoryLog{},
		History:   &operator.MemoryHistory{},
	}
}

// limiters returns the limit of each user, and the limit of all users, if there is one.
func limiters(cfg config, l operator.Limits) []operator.Limiter {
	user, global := httpapi.Limits(cfg.userLimit, cfg.globalLimit)
	all := []operator.Limiter{{Name: "requests", Limiter: l, Limits: []ratelimit.Limit{user}}}
	if cfg.globalLimit > 0 {
		all = append(all, operator.Limiter{Name: "requests.global", Limiter: l, Limits: []ratelimit.Limit{global}, Keys: []string{""}})
	}
	return all
}

// shopTables are the shop's own tables.
type shopTables struct{ *parts }

// Migrate creates the tables or brings them up to date.
func (s shopTables) Migrate(ctx context.Context) error {
	return postgres.Migrate(ctx, s.servers.workers)
}

// pagePath is the path of the operator's page.
const pagePath = "/operator/"

// newPage returns the operator's page. On real servers it exists only if a password is set. Whoever knows the
// password may do everything, under the name they give. In memory everybody may do everything.
func newPage(cfg config, service operator.Config) *page.Page {
	if cfg.operatorPassword == "" && cfg.backend != backendMemory {
		return nil
	}
	return must(page.New(service, page.Config{Authorize: func(r *http.Request) (operator.Access, error) {
		name, password, given := r.BasicAuth()
		if cfg.operatorPassword == "" {
			return operator.Access{By: "visitor", Bodies: true, Change: true}, nil
		}
		if !given || name == "" || subtle.ConstantTimeCompare([]byte(password), []byte(cfg.operatorPassword)) != 1 {
			return operator.Access{}, errors.New("wrong password")
		}
		return operator.Access{By: name, Bodies: true, Change: true}, nil
	}}))
}

// withPage serves the page in front of next.
func (f *front) withPage(cfg config, next http.Handler) http.Handler {
	if f.page == nil {
		return next
	}
	shown := http.StripPrefix(strings.TrimSuffix(pagePath, "/"), f.page)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _, given := r.BasicAuth()
		switch {
		case !strings.HasPrefix(r.URL.Path+"/", pagePath):
			next.ServeHTTP(w, r)
		case cfg.operatorPassword != "" && !given:
			w.Header().Set("WWW-Authenticate", `Basic realm="operator", charset="UTF-8"`)
			http.Error(w, "name and password required", http.StatusUnauthorized)
		default:
			shown.ServeHTTP(w, r)
		}
	})
}

// show adds the services of the shop's page on real servers. A process of any role writes its notes to Redis, and one with
// an API shows the notes of all processes.
func (p *parts) show(cfg config, b *backend) {
	b.group.Add("flow", p.flow)
	if !cfg.hasAPI() {
		return
	}
	waits := &backlog{outbox: p.messages.Depth, queue: p.broker.consumer.Stats, inHand: p.handled.inHand.Load}
	b.group.Add("backlog", waits)
	b.backlog = waits.Look
	if cfg.trials {
		b.trials = p.trials()
	}
}
