package ratelimit

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/holdfast-go/holdfast/internal/problem"
	"github.com/holdfast-go/holdfast/internal/telemetry"
)

// ErrNoKey is returned by key functions for a request that does not say whom to
// charge. Such requests are refused: they never share a quota.
var ErrNoKey = errors.New("ratelimit: request has no key")

// quotaExceeded is the problem type of the header draft.
const quotaExceeded = "https://iana.org/assignments/http-problem-types#quota-exceeded"

// MiddlewareConfig configures NewMiddleware.
type MiddlewareConfig struct {
	// Charges says what a request is charged: limits and costs may depend on its
	// route, its user and the user's plan. Required. No charges let the request
	// pass. An error refuses it: ErrNoKey with 400 RATE_LIMIT_KEY_REQUIRED, any
	// other with 500.
	Charges func(*http.Request) ([]Charge, error)

	// Headers says which header fields tell clients of their limits. The zero value
	// is HeadersDraft10.
	Headers Headers

	// Shadow, if set, is called with each denial instead of refusing the request, to
	// try limits out: every request is served, no header is sent, and denials are
	// counted as shadow. Use a middleware of its own for the limits on trial.
	Shadow func(r *http.Request, d Decision)

	// OnDecision is called with every decision. Optional.
	OnDecision func(r *http.Request, d Decision)

	// RetryUnavailable is the Retry-After of the 503 that is sent when the store
	// cannot be asked. 0 means 1 s.
	RetryUnavailable time.Duration

	// Logger is for errors that the client is not told: one line in 10 s, with how many
	// were left out. Nil means slog.Default().
	Logger *slog.Logger

	MeterProvider metric.MeterProvider // nil means the global one
}

func (c MiddlewareConfig) validate(l Limiter) error {
	var errs []error
	if l == nil {
		errs = append(errs, errNilLimiter)
	}
	if c.Charges == nil {
		errs = append(errs, errors.New("ratelimit: MiddlewareConfig.Charges is nil"))
	}
	if c.Headers > HeadersNone {
		errs = append(errs, fmt.Errorf("ratelimit: MiddlewareConfig.Headers %d is unknown", c.Headers))
	}
	if c.RetryUnavailable < 0 {
		errs = append(errs, fmt.Errorf("ratelimit: MiddlewareConfig.RetryUnavailable is %v, must not be negative", c.RetryUnavailable))
	}
	return errors.Join(errs...)
}

// NewMiddleware returns HTTP middleware that charges requests to l. A denied
// request gets 429 with the code RATE_LIMITED, the violated limits and
// Retry-After; one that could not be decided gets 503 with the code
// RATE_LIMIT_UNAVAILABLE. Decided requests carry the headers of
// MiddlewareConfig.Headers.
func NewMiddleware(l Limiter, cfg MiddlewareConfig) (func(http.Handler) http.Handler, error) {
	if err := cfg.validate(l); err != nil {
		return nil, err
	}
	if cfg.RetryUnavailable == 0 {
		cfg.RetryUnavailable = time.Second
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
		return &handler{limiter: l, refunds: refunds, cfg: cfg, next: next, requests: requests, faults: faults}
	}, nil
}

type handler struct {
	limiter  Limiter
	refunds  *Memory // what was given back, within the same limits
	cfg      MiddlewareConfig
	next     http.Handler
	requests metric.Int64Counter
	faults   *telemetry.Seldom
}

func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	charges, err := h.cfg.Charges(r)
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
	if h.cfg.OnDecision != nil {
		h.cfg.OnDecision(r, d)
	}
	h.count(r, outcomeOf(d, h.cfg.Shadow != nil), d.Denied)
	if h.cfg.Shadow == nil {
		h.cfg.Headers.write(w.Header(), d)
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
	if !errors.Is(err, ErrNoKey) && r.Context().Err() == nil {
		if repeats, ok := h.faults.Due(); ok {
			h.cfg.Logger.ErrorContext(r.Context(), "ratelimit: request undecided", slog.Any("error", err), slog.Int("repeats", repeats))
		}
	}
	switch {
	case h.cfg.Shadow != nil:
		h.next.ServeHTTP(w, r)
	case errors.Is(err, ErrNoKey):
		problem.Write(w, problem.Problem{
			Status: http.StatusBadRequest, Code: "RATE_LIMIT_KEY_REQUIRED",
			Title: "The request does not say whom to charge.",
		})
	case errors.Is(err, ErrUnavailable):
		problem.Write(w, problem.Problem{
			Status: http.StatusServiceUnavailable, Code: "RATE_LIMIT_UNAVAILABLE",
			Title: "The rate limit cannot be checked at the moment.", RetryAfter: h.cfg.RetryUnavailable,
		})
	default:
		problem.Write(w, problem.Problem{Status: http.StatusInternalServerError, Code: "INTERNAL"})
	}
}

func writeDenied(w http.ResponseWriter, d Decision) {
	p := problem.Problem{
		Status:     http.StatusTooManyRequests,
		Code:       "RATE_LIMITED",
		Title:      "Too many requests.",
		RetryAfter: d.RetryAfter,
		Extra:      map[string]any{"type": quotaExceeded, "violated-policies": d.violated()},
	}
	if d.Never {
		p.Detail = "The request costs more than its limit allows at any time."
	}
	problem.Write(w, p)
}

// HeaderKey returns a key function that takes the key from a request header, as
// a gateway or an authentication layer sets it. A header that is missing, empty
// or sent twice is ErrNoKey.
func HeaderKey(name string) func(*http.Request) (string, error) {
	return func(r *http.Request) (string, error) {
		values := r.Header.Values(name)
		if len(values) != 1 || values[0] == "" {
			return "", fmt.Errorf("%w: header %s", ErrNoKey, name)
		}
		return values[0], nil
	}
}
