package main

import (
	"context"
	"fmt"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/otel"
	otelprometheus "go.opentelemetry.io/otel/exporters/prometheus"
	sdk "go.opentelemetry.io/otel/sdk/metric"
)

// serveMetrics has all components of the process measure, and returns what serves that as Prometheus text.
func serveMetrics() (_ http.Handler, stop func(), _ error) {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	exporter, err := otelprometheus.New(otelprometheus.WithRegisterer(registry))
	if err != nil {
		return nil, nil, fmt.Errorf("metrics: %w", err)
	}
	provider := sdk.NewMeterProvider(sdk.WithReader(exporter))
	otel.SetMeterProvider(provider)
	// Nothing is pushed anywhere, so nothing can be lost when it stops.
	stop = func() { _ = provider.Shutdown(context.Background()) }
	return promhttp.HandlerFor(registry, promhttp.HandlerOpts{}), stop, nil
}
