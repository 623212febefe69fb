// Package limit charges RPCs to rate limits, behind the HTTP middleware of ratelimit.
package limit

import (
	"context"
	"net/http"

	spb "google.golang.org/genproto/googleapis/rpc/status"

	"github.com/holdfast-go/holdfast/modules/rpc/internal/exchange"
	"github.com/holdfast-go/holdfast/ratelimit"
)

// Guard is one middleware for the calls of a server. It is safe for concurrent use.
type Guard struct{ handler http.Handler }

// New returns a Guard.
func New(l ratelimit.Limiter, charges func(*http.Request) ([]ratelimit.Charge, error), cfg ratelimit.MiddlewareConfig) (*Guard, error) {
	limited, err := ratelimit.NewMiddleware(l, charges, cfg)
	if err != nil {
		return nil, err
	}
	return &Guard{handler: limited(http.HandlerFunc(serve))}, nil
}

// runKey is the context key of the function that runs an admitted call.
type runKey struct{}

// Do calls run, unless a limit denies the call or the limiter is unavailable; then it returns the
// status. Calls of the health service are not charged. The context of run allows refunds. The
// header is for the client. run gets it before the call; a refund changes it.
func (g *Guard) Do(ctx context.Context, about exchange.Call, run func(ctx context.Context, header http.Header)) (http.Header, *spb.Status) {
	if exchange.OfHealth(about.Procedure) {
		run(ctx, http.Header{})
		return nil, nil
	}
	w := exchange.NewWriter()
	g.handler.ServeHTTP(w, about.Request(context.WithValue(ctx, runKey{}, run)))
	refused := w.Refusal()
	w.Head.Del("Content-Type")
	w.Head.Del("X-Content-Type-Options")
	return w.Head, refused
}

func serve(w http.ResponseWriter, r *http.Request) {
	if run, ok := r.Context().Value(runKey{}).(func(context.Context, http.Header)); ok {
		run(r.Context(), w.Header())
	}
}
