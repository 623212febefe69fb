package telemetry

import (
	"os"
	"slices"
	"strings"

	"go.opentelemetry.io/otel/attribute"
)

// optIn is the variable by which OpenTelemetry lets conventions be chosen that are in development.
const optIn = "OTEL_SEMCONV_STABILITY_OPT_IN"

// Operation returns what the conventions for messaging say of an operation on one message: create, send
// or process. They are in development, so it is nothing unless the environment asks for messaging.
func Operation(name string) []attribute.KeyValue {
	asked := strings.Split(os.Getenv(optIn), ",")
	if !slices.ContainsFunc(asked, func(s string) bool { return s == "messaging" || s == "messaging/dup" }) {
		return nil
	}
	return []attribute.KeyValue{
		attribute.String("messaging.operation.name", name),
		attribute.String("messaging.operation.type", name),
	}
}
