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

// One reservation is one trace: through three processes, from the request to the read model. Relay and consumer end by
// themselves after one message.
func TestTrace_acrossProcesses(t *testing.T) {
	brokers(t, func(t *testing.T, flags ...string) {
		spans := &collected{}
		otlp := httptest.NewServer(spans)
		t.Cleanup(otlp.Close)
		env := append(newServices(t).env(), "OTEL_EXPORTER_OTLP_ENDPOINT="+otlp.URL, "OTEL_BSP_SCHEDULE_DELAY=50")
		run := func(role string, more ...string) *process {
			return start(t, env, slices.Concat([]string{"-backend=services", "-role=" + role}, flags, more)...)
		}
		api, relay, consumer := run("api"), run("relay", "-message-limit=1"), run("consumer", "-message-limit=1")
		c := newClient(t, api.url)
		event := c.newEvent(`{"name":"Concert","seats":10}`)

		const (
			traceID = "0af7651916cd43dd8448eb211c80319c"
			caller  = "b7ad6b7169203331"
		)
		req, err := http.NewRequest(http.MethodPost, api.url+"/api/reservations", strings.NewReader(holdBody(event, `"seats":["A1"]`)))
		noError(t, err)
		for name, value := range map[string]string{
			"X-Mock-User-Id": newUser(), "Idempotency-Key": newKey(), "Content-Type": "application/json",
			"traceparent": "00-" + traceID + "-" + caller + "-01",
		} {
			req.Header.Set(name, value)
		}
		answer, err := c.send(req)
		noError(t, err)
		answer.wants(http.StatusCreated, "")
		for _, p := range []*process{relay, consumer} {
			<-p.ended
			if p.err != nil || !strings.Contains(p.stderr.String(), "it has handled 1 messages") {
				t.Errorf("ended with %v\n%s", p.err, p.stderr)
			}
		}
		system := "rabbitmq"
		if len(flags) > 0 {
			system = "redis"
		}
		// By the names of the spans, from the caller to the leaves.
		const request = "POST /api/reservations > txretry.Do > txretry.attempt > create reservation.held"
		process := "consumer " + request + " > process QUEUE by " + system
		want := []string{
			"api POST /api/reservations", "api POST /api/reservations > txretry.Do", "api POST /api/reservations > txretry.Do > txretry.attempt",
			"api " + request, "relay " + request + " > send reservation.held by " + system,
			process, process + " > txretry.Do", process + " > txretry.Do > txretry.attempt", process + " > txretry.Do > txretry.attempt > read model",
		}
		slices.Sort(want)
		testenv.Eventually(t, func() error {
			if got := spans.paths(traceID, caller); !slices.Equal(got, want) {
				return fmt.Errorf("the trace has the spans\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
			}
			return nil
		})
	})
}

// collected is a collector of OTLP over HTTP that keeps all spans.
type collected struct {
	mu    sync.Mutex
	spans []collectedSpan
}

type collectedSpan struct{ trace, id, parent, name, role string }

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
		role := ""
		for _, kv := range process.Resource.Attributes {
			if kv.Key == "reservation.role" {
				role = kv.Value.GetStringValue()
			}
		}
		for _, scope := range process.ScopeSpans {
			for _, s := range scope.Spans {
				span := collectedSpan{hex.EncodeToString(s.TraceId), hex.EncodeToString(s.SpanId), hex.EncodeToString(s.ParentSpanId), s.Name, role}
				if strings.HasPrefix(s.Name, "process ") {
					span.name = "process QUEUE" // or stream
				}
				for _, kv := range s.Attributes {
					if kv.Key == "messaging.system" {
						span.name += " by " + kv.Value.GetStringValue()
					}
				}
				c.spans = append(c.spans, span)
			}
		}
	}
	w.Header().Set("Content-Type", "application/x-protobuf")
}

// paths returns the spans of a trace in order, each with its process and its parents up to the caller. A parent that is
// not there is a question mark.
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
		switch s, ok := byID[id]; {
		case !ok:
			return "?"
		case s.parent == caller:
			return s.name
		default:
			return path(s.parent) + " > " + s.name
		}
	}
	var all []string
	for id, s := range byID {
		all = append(all, s.role+" "+path(id))
	}
	slices.Sort(all)
	return all
}
