package web_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/web"
	"github.com/holdfast-go/holdfast/ratelimit"
)

// remote is a limiter that cannot be asked once its caller has given up.
type remote struct{ *ratelimit.Memory }

func (r remote) Peek(ctx context.Context, charges ...ratelimit.Charge) (ratelimit.Decision, error) {
	if err := ctx.Err(); err != nil {
		return ratelimit.Decision{}, err
	}
	return r.Memory.Peek(ctx, charges...)
}

// A stream ends when it is time for another look, and which of the two comes first is chance. No stream ends by telling
// that the limits are unknown.
func TestEndOfStreamTellsNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		memory, err := ratelimit.NewMemory(ratelimit.MemoryConfig{})
		if err != nil {
			t.Fatal(err)
		}
		page, err := web.New(web.Config{
			API: http.NotFoundHandler(), Flow: flow.New(), Backlog: func(context.Context) (flow.Backlog, error) { return flow.Backlog{}, nil },
			Limits: web.Limits{Limiter: remote{memory}, User: ratelimit.Limit{Name: "user", Max: 10}},
		})
		if err != nil {
			t.Fatal(err)
		}
		const streams = 20
		for range streams {
			w := httptest.NewRecorder()
			page.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/shop/live?user=ada", nil))
			if told := w.Body.String(); strings.Contains(told, `"limits":[]`) || strings.Count(told, `"left":10`) < 100 {
				t.Fatalf("the stream tells: %s", told[max(0, len(told)-500):])
			}
		}
	})
}
