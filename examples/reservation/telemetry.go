package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	otelprometheus "go.opentelemetry.io/otel/exporters/prometheus"
	metricnoop "go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/propagation"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
)

// serveMetrics turns on the metrics of all components. The handler serves them as Prometheus text.
func serveMetrics() (_ http.Handler, stop func(), _ error) {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	exporter, err := otelprometheus.New(otelprometheus.WithRegisterer(registry))
	if err != nil {
		return nil, nil, fmt.Errorf("metrics: %w", err)
	}
	provider := sdkmetric.NewMeterProvider(sdkmetric.WithReader(exporter))
	otel.SetMeterProvider(provider)
	// Nothing is pushed, so a shutdown loses nothing.
	stop = func() { _ = provider.Shutdown(context.Background()) }
	return promhttp.HandlerFor(registry, promhttp.HandlerOpts{}), stop, nil
}

// tracesWanted reads from OpenTelemetry's variables whether to export traces. The exporter reads the address.
func tracesWanted(getenv func(string) string) (bool, error) {
	switch exporter := getenv("OTEL_TRACES_EXPORTER"); exporter {
	case "otlp":
		return true, nil
	case "none":
		return false, nil
	case "":
		return getenv("OTEL_EXPORTER_OTLP_ENDPOINT") != "" || getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") != "", nil
	default:
		return false, fmt.Errorf("OTEL_TRACES_EXPORTER is %q, must be otlp or none", exporter)
	}
}

// exportTraces exports the spans of all components by OTLP over HTTP. stop sends the last spans.
func exportTraces(ctx context.Context, cfg config) (stop func(), _ error) {
	if !cfg.traces {
		return func() {}, nil
	}
	exporter, err := otlptracehttp.New(ctx)
	if err != nil {
		return nil, fmt.Errorf("traces: %w", err)
	}
	// OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence.
	process, err := resource.New(ctx, resource.WithTelemetrySDK(), resource.WithProcessPID(), resource.WithAttributes(
		attribute.String("service.name", "reservation"),
		attribute.String("service.instance.id", uuid.NewString()),
		attribute.String("reservation.role", cfg.role),
	), resource.WithFromEnv())
	if err != nil && !errors.Is(err, resource.ErrPartialResource) {
		return nil, fmt.Errorf("traces: %w", err)
	}
	provider := sdktrace.NewTracerProvider(sdktrace.WithBatcher(exporter), sdktrace.WithResource(process))
	otel.SetTracerProvider(provider)
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) {
		slog.WarnContext(ctx, "telemetry", slog.Any("error", err))
	}))
	return func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
		defer cancel()
		if err := provider.Shutdown(ctx); err != nil {
			slog.WarnContext(ctx, "lost the last spans", slog.Any("error", err))
		}
	}, nil
}

// traced gives each request a span, in the trace of its traceparent if it has one.
func traced(routes http.Handler) http.Handler {
	return otelhttp.NewHandler(routes, "request",
		otelhttp.WithPropagators(propagation.TraceContext{}), otelhttp.WithMeterProvider(metricnoop.NewMeterProvider()))
}
