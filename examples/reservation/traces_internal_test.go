package main

import "testing"

func TestTracesWanted(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name      string
		variables map[string]string
		want      bool
		wrong     bool
	}{
		{name: "nothing is said"},
		{name: "an endpoint", variables: map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, want: true},
		{name: "an endpoint of traces", variables: map[string]string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318/v1/traces"}, want: true},
		{name: "the default endpoint", variables: map[string]string{"OTEL_TRACES_EXPORTER": "otlp"}, want: true},
		{name: "none in spite of an endpoint", variables: map[string]string{"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}},
		{name: "an exporter that is not here", variables: map[string]string{"OTEL_TRACES_EXPORTER": "zipkin"}, wrong: true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got, err := tracesWanted(func(name string) string { return tc.variables[name] })
			if got != tc.want || (err != nil) != tc.wrong {
				t.Errorf("wanted is %v (%v), want %v", got, err, tc.want)
			}
		})
	}
}
