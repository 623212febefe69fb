package main

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/memory"
	"github.com/holdfast-go/holdfast/outbox"
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

// relayService runs a relay and the publisher it needs, which stops after it: the relay's last messages are still confirmed.
func relayService(relay *outbox.Relay, publisher interface {
	Run(ctx context.Context) error
	Ready(ctx context.Context) error
},
) service {
	run := func(ctx context.Context) error {
		return whilePublishing(ctx, publisher.Run, func(ctx context.Context) error { return relay.Run(ctx) })
	}
	ready := func(ctx context.Context) error {
		if err := publisher.Ready(ctx); err != nil {
			return err
		}
		return relay.Ready(ctx)
	}
	return service{roleRelay, run, ready}
}

// whilePublishing runs do beside publish, which outlives ctx until do has ended.
func whilePublishing(ctx context.Context, publish, do func(context.Context) error) error {
	publishing, stop := context.WithCancel(context.WithoutCancel(ctx))
	ended := make(chan error, 1)
	go func() { ended <- publish(publishing) }()
	err := do(ctx)
	stop()
	if failed := <-ended; err == nil && failed != nil {
		err = fmt.Errorf("publisher: %w", failed)
	}
	return err
}
