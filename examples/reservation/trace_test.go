package main_test

import (
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/protobuf/proto"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// One reservation is one trace: through three processes, from the request to the read model.
func TestOneTrace(t *testing.T) {
	brokers(t, func(t *testing.T, flags ...string) {
		spans := &collected{}
		otlp := httptest.NewServer(spans)
		t.Cleanup(otlp.Close)
		env := append(newServices(t).env(), "OTEL_EXPORTER_OTLP_ENDPOINT="+otlp.URL, "OTEL_BSP_SCHEDULE_DELAY=50")
		run := func(role string) *process {
			return start(t, env, append([]string{"-backend=services", "-role=" + role}, flags...)...)
		}
		api, _, _ := run("api"), run("relay"), run("consumer")
		c := newClient(t, api.url)
		event := c.newEvent(`{"name":"Concert","seats":10}`)

		const (
			traceID = "0af7651916cd43dd8448eb211c80319c"
			caller  = "b7ad6b7169203331"
		)
		req, err := http.NewRequest(http.MethodPost, api.url+"/api/reservations", strings.NewReader(holdBody(event, `"seats":["A1"]`)))
		if err != nil {
			t.Fatal(err)
		}
		for name, value := range map[string]string{
			"X-Mock-User-Id": newUser(), "Idempotency-Key": newKey(), "Content-Type": "application/json",
			"traceparent": "00-" + traceID + "-" + caller + "-01",
		} {
			req.Header.Set(name, value)
		}
		answer, err := c.send(req)
		if err != nil {
			t.Fatal(err)
		}
		answer.wants(http.StatusCreated, "")
		// By the names of the spans, from the caller to the leaves.
		want := []string{
			"api POST /api/reservations",
			"api POST /api/reservations > txretry.Do",
			"api POST /api/reservations > txretry.Do > txretry.attempt",
			"api POST /api/reservations > txretry.Do > txretry.attempt > create reservation.held",
			"relay POST /api/reservations > txretry.Do > txretry.attempt > create reservation.held > send reservation.held",
			"consumer POST /api/reservations > txretry.Do > txretry.attempt > create reservation.held > process QUEUE",
			"consumer POST /api/reservations > txretry.Do > txretry.attempt > create reservation.held > process QUEUE > txretry.Do",
			"consumer POST /api/reservations > txretry.Do > txretry.attempt > create reservation.held > process QUEUE > txretry.Do > txretry.attempt",
			"consumer POST /api/reservations > txretry.Do > txretry.attempt > create reservation.held > process QUEUE > txretry.Do > txretry.attempt > read model",
		}
		testenv.Eventually(t, func() error {
			got := spans.paths(traceID, caller)
			for _, path := range want {
				if !slices.Contains(got, path) {
					return fmt.Errorf("no span %q among\n%s", path, strings.Join(got, "\n"))
				}
			}
			return nil
		})
		for _, path := range spans.paths(traceID, caller) {
			if !slices.Contains(want, path) {
				t.Errorf("the trace has a span %q", path)
			}
		}
		system := "rabbitmq"
		if len(flags) > 0 {
			system = "redis"
		}
		if got := spans.systems(traceID); !slices.Equal(got, []string{"process " + system, "send " + system}) {
			t.Errorf("the trace names the brokers %q, want %s", got, system)
		}
		if n := spans.instances(traceID); n != 3 {
			t.Errorf("the trace is of %d instances, want 3", n)
		}
	})
}

// collected is a collector of OTLP over HTTP that keeps all spans.
type collected struct {
	mu    sync.Mutex
	spans []collectedSpan
}

type collectedSpan struct{ trace, id, parent, name, role, instance, system string }

func (c *collected) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	var export collector.ExportTraceServiceRequest
	if err == nil {
		err = proto.Unmarshal(body, &export)
	}
	if err != nil || r.URL.Path != "/v1/traces" {
		http.Error(w, fmt.Sprint(r.URL.Path, err), http.StatusBadRequest)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, process := range export.ResourceSpans {
		attributes := map[string]string{}
		for _, kv := range process.Resource.Attributes {
			attributes[kv.Key] = kv.Value.GetStringValue()
		}
		for _, scope := range process.ScopeSpans {
			for _, s := range scope.Spans {
				system := ""
				for _, kv := range s.Attributes {
					if kv.Key == "messaging.system" {
						system = kv.Value.GetStringValue()
					}
				}
				c.spans = append(c.spans, collectedSpan{
					hex.EncodeToString(s.TraceId), hex.EncodeToString(s.SpanId), hex.EncodeToString(s.ParentSpanId), s.Name,
					attributes["reservation.role"], attributes["service.instance.id"], system,
				})
			}
		}
	}
	w.Header().Set("Content-Type", "application/x-protobuf")
}

// paths returns the spans of a trace, each with its process and what is above it up to the caller. A parent that has not
// come is a question mark.
func (c *collected) paths(traceID, caller string) []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	byID := map[string]collectedSpan{}
	for _, s := range c.spans {
		if s.trace == traceID {
			byID[s.id] = s
		}
	}
	var path func(id string) string
	path = func(id string) string {
		s, ok := byID[id]
		name := s.name
		if strings.HasPrefix(name, "process ") {
			name = "process QUEUE" // or stream
		}
		switch {
		case !ok:
			return "?"
		case s.parent == caller:
			return name
		}
		return path(s.parent) + " > " + name
	}
	var all []string
	for id, s := range byID {
		all = append(all, s.role+" "+path(id))
	}
	slices.Sort(all)
	return all
}

// systems returns the operations of a trace that name a broker, with it.
func (c *collected) systems(traceID string) []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var found []string
	for _, s := range c.spans {
		if operation, _, _ := strings.Cut(s.name, " "); s.trace == traceID && s.system != "" {
			found = append(found, operation+" "+s.system)
		}
	}
	slices.Sort(found)
	return found
}

// instances counts the processes that a trace is of.
func (c *collected) instances(traceID string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	found := map[string]bool{}
	for _, s := range c.spans {
		if s.trace == traceID {
			found[s.instance] = true
		}
	}
	return len(found)
}
