package main

import (
	"context"
	"log/slog"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/memory"
)

// open makes the back end that was asked for, ready to run.
func open(ctx context.Context, cfg config, m *metrics, log *slog.Logger) (*backend, error) {
	switch cfg.backend {
	case backendMemory:
		return openMemory(cfg, m, log)
	case backendContainers:
		containers, err := startContainers(ctx, &cfg, log)
		if err != nil {
			return nil, err
		}
		b, err := openServices(ctx, cfg, m, log)
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
		return openServices(ctx, cfg, m, log)
	}
}

func openMemory(cfg config, m *metrics, log *slog.Logger) (*backend, error) {
	parts, err := memory.Open(memory.Config{Schedule: cfg.sweep, Logger: log, MeterProvider: m.provider})
	if err != nil {
		return nil, err
	}
	return &backend{
		shop: parts.Shop, keys: parts.Keys, limiter: parts.Limiter,
		services: []service{
			{roleSweeper, parts.Sweeper.Run, parts.Sweeper.Ready},
			{roleRelay, parts.Relay.Run, parts.Relay.Ready},
			{roleConsumer, parts.Consumer.Run, parts.Consumer.Ready},
		},
		close: func() {},
	}, nil
}
