package ratelimit

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/holdfast-go/holdfast/internal/problem"
	"github.com/holdfast-go/holdfast/internal/telemetry"
)

// quotaExceeded is the problem type of the header draft.
const quotaExceeded = "https://iana.org/assignments/http-problem-types#quota-exceeded"

// MiddlewareConfig configures NewMiddleware. The zero value works.
type MiddlewareConfig struct {
	// LegacyHeaders also sends X-RateLimit-Limit, X-RateLimit-Remaining and X-RateLimit-Reset, in
	// seconds from now, of the limit that is nearest to its end.
	LegacyHeaders bool

	// Shadow is called with each denial instead of refusing the request, to try limits out: every
	// request is served, no header is sent, and denials are counted as shadow. Use a middleware of
	// its own for the limits on trial. Optional.
	Shadow func(r *http.Request, d Decision)

	// Logger is for errors that the client is not told: one line in 10 s, with how many were left
	// out. Default: slog.Default().
	Logger *slog.Logger

	// MeterProvider is for the counter holdfast.ratelimit.requests. Default: the global one.
	MeterProvider metric.MeterProvider
}

// NewMiddleware returns HTTP middleware that charges requests to l. charges says what a request is
// charged: limits and costs may depend on its route, its user and the user's plan. No charges let the
// request pass.
//
// A denied request gets 429 with the code RATE_LIMITED, the violated limits and Retry-After. One that
// could not be decided gets 503 RATE_LIMIT_UNAVAILABLE. An error of charges refuses the request: with
// its own code and status if it has the methods Code() string and HTTPStatus() int, as ErrNoKey has,
// and with 500 otherwise. Decided requests carry RateLimit-Policy and RateLimit, as version 10 of
// draft-ietf-httpapi-ratelimit-headers has them.
func NewMiddleware(l Limiter, charges func(*http.Request) ([]Charge, error), cfg MiddlewareConfig) (func(http.Handler) http.Handler, error) {
	var errs []error
	if l == nil {
		errs = append(errs, errNilLimiter)
	}
	if charges == nil {
		errs = append(errs, errors.New("ratelimit: charges is nil"))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	requests, err := telemetry.New("github.com/holdfast-go/holdfast/ratelimit", nil, cfg.MeterProvider).Meter.
		Int64Counter("holdfast.ratelimit.requests", metric.WithDescription("Requests by outcome, and by the limit that denied."), metric.WithUnit("{request}"))
	if err != nil {
		return nil, fmt.Errorf("ratelimit: %w", err)
	}
	refunds, err := NewMemory(MemoryConfig{})
	if err != nil {
		return nil, err
	}
	faults := &telemetry.Seldom{}
	return func(next http.Handler) http.Handler {
		return &handler{limiter: l, charges: charges, refunds: refunds, cfg: cfg, next: next, requests: requests, faults: faults}
	}, nil
}

type handler struct {
	limiter  Limiter
	charges  func(*http.Request) ([]Charge, error)
	refunds  *Memory // what was given back, within ten times the same limits
	cfg      MiddlewareConfig
	next     http.Handler
	requests metric.Int64Counter
	faults   *telemetry.Seldom
}

func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	charges, err := h.charges(r)
	if err != nil {
		h.undecided(w, r, err)
		return
	}
	if len(charges) == 0 {
		h.next.ServeHTTP(w, r)
		return
	}
	d, err := h.limiter.Allow(r.Context(), charges...)
	if err != nil {
		h.undecided(w, r, err)
		return
	}
	h.count(r, outcomeOf(d, h.cfg.Shadow != nil), d.Denied)
	if h.cfg.Shadow == nil {
		writeHeaders(w.Header(), d, h.cfg.LegacyHeaders)
	}
	if d.Allowed {
		h.next.ServeHTTP(w, h.remember(w, r, d))
		return
	}
	if h.cfg.Shadow != nil {
		h.cfg.Shadow(r, d)
		h.next.ServeHTTP(w, r)
		return
	}
	writeDenied(w, d)
}

func outcomeOf(d Decision, shadow bool) string {
	switch {
	case d.Allowed && d.Fallback:
		return "fallback"
	case d.Allowed:
		return "allowed"
	case shadow:
		return "shadow"
	}
	return "denied"
}

func (h *handler) count(r *http.Request, outcome, limit string) {
	h.requests.Add(r.Context(), 1, metric.WithAttributes(attribute.String("outcome", outcome), attribute.String("limit", limit)))
}

// undecided answers a request about which nothing could be decided.
func (h *handler) undecided(w http.ResponseWriter, r *http.Request, err error) {
	h.count(r, "undecided", "")
	p, _ := problem.Of(err)
	if p.Status >= http.StatusInternalServerError && r.Context().Err() == nil {
		if repeats, ok := h.faults.Due(); ok {
			h.cfg.Logger.ErrorContext(r.Context(), "ratelimit: request undecided", slog.Any("error", err), slog.Int("repeats", repeats))
		}
	}
	if h.cfg.Shadow != nil {
		h.next.ServeHTTP(w, r)
		return
	}
	problem.Write(w, p)
}

func writeDenied(w http.ResponseWriter, d Decision) {
	p, _ := problem.Of(d.Err())
	p.Type, p.Title = quotaExceeded, "Too many requests."
	p.Extra = map[string]any{"violated-policies": d.violated()}
	problem.Write(w, p)
}

// HeaderKey returns a key function that takes the key from a request header, as a gateway or an
// authentication layer sets it. A header that is missing, empty or sent twice is ErrNoKey.
func HeaderKey(name string) func(*http.Request) (string, error) {
	return func(r *http.Request) (string, error) {
		values := r.Header.Values(name)
		if len(values) != 1 || values[0] == "" {
			return "", fmt.Errorf("%w: header %s", ErrNoKey, name)
		}
		return values[0], nil
	}
}
