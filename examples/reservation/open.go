package main

import (
	"context"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/memory"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/web"
)

// open makes the back end that was asked for, ready to run.
func open(ctx context.Context, cfg config) (*backend, error) {
	switch cfg.backend {
	case backendMemory:
		return openMemory(cfg)
	case backendContainers:
		containers, err := startContainers(ctx, &cfg)
		if err != nil {
			return nil, err
		}
		b, err := openServices(ctx, cfg)
		if err != nil {
			containers.stop()
			return nil, err
		}
		closeServices := b.close
		b.close = func() {
			closeServices()
			containers.stop()
		}
		return b, nil
	default:
		return openServices(ctx, cfg)
	}
}

func openMemory(cfg config) (*backend, error) {
	tracker := flow.New()
	parts, err := memory.Open(memory.Config{Schedule: cfg.sweep, Flow: tracker})
	if err != nil {
		return nil, err
	}
	checks := map[string]func(context.Context) error{}
	var outages []web.Server
	for _, server := range parts.Demo.Servers() {
		outages = append(outages, server)
		if server != parts.Demo.RabbitMQ { // requests are served without the broker
			checks[server.Name()] = server.Ready
		}
	}
	group := newGroup(cfg, parts.Sweeper, parts.Consumer, parts.Relay)
	b := &backend{
		shop: parts.Shop, keys: parts.Keys, limiter: parts.Limiter, group: group, ready: group.Ready(checks),
		operator: memoryOperator(cfg, parts), handled: &handled{},
		flow: tracker, backlog: parts.Demo.Backlog, close: func() {},
	}
	if cfg.trials {
		b.trials, b.outages = parts.Demo, outages
	}
	return b, nil
}
