package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/internal/problem"
)

// ErrNoKey is returned by key functions for a request that does not say whom to
// charge. Such requests are refused: they never share a quota.
var ErrNoKey = errors.New("ratelimit: request has no key")

// MiddlewareConfig configures NewMiddleware.
type MiddlewareConfig struct {
	// Charges says what a request is charged. Required. No charges let the request
	// pass. An error refuses it: ErrNoKey with 400 RATE_LIMIT_KEY_REQUIRED, any
	// other with 500.
	Charges func(*http.Request) ([]Charge, error)

	// RetryUnavailable is the Retry-After of the 503 that is sent when the store
	// cannot be asked. 0 means 1 s.
	RetryUnavailable time.Duration

	// Logger is for errors that the client is not told. Nil means slog.Default().
	Logger *slog.Logger
}

// NewMiddleware returns HTTP middleware that charges requests to l. A denied
// request gets 429 with the code RATE_LIMITED and Retry-After; one that could not
// be decided gets 503 with the code RATE_LIMIT_UNAVAILABLE. Decided requests carry
// the headers RateLimit and RateLimit-Policy.
func NewMiddleware(l Limiter, cfg MiddlewareConfig) (func(http.Handler) http.Handler, error) {
	var errs []error
	if l == nil {
		errs = append(errs, errNilLimiter)
	}
	if cfg.Charges == nil {
		errs = append(errs, errors.New("ratelimit: MiddlewareConfig.Charges is nil"))
	}
	if cfg.RetryUnavailable < 0 {
		errs = append(errs, fmt.Errorf("ratelimit: MiddlewareConfig.RetryUnavailable is %v, must not be negative", cfg.RetryUnavailable))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	if cfg.RetryUnavailable == 0 {
		cfg.RetryUnavailable = time.Second
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	return func(next http.Handler) http.Handler {
		return &handler{limiter: l, cfg: cfg, next: next}
	}, nil
}

type handler struct {
	limiter Limiter
	cfg     MiddlewareConfig
	next    http.Handler
}

func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	charges, err := h.cfg.Charges(r)
	if err != nil {
		h.refuse(w, r, err)
		return
	}
	if len(charges) == 0 {
		h.next.ServeHTTP(w, r)
		return
	}
	d, err := h.limiter.Allow(r.Context(), charges...)
	if err != nil {
		h.refuse(w, r, err)
		return
	}
	writeHeaders(w.Header(), d)
	if !d.Allowed {
		writeDenied(w, d)
		return
	}
	taken := &taken{limiter: h.limiter, charges: d.Charges()}
	h.next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), takenKey{}, taken)))
}

// refuse answers a request about which nothing could be decided.
func (h *handler) refuse(w http.ResponseWriter, r *http.Request, err error) {
	switch {
	case errors.Is(err, ErrNoKey):
		problem.Write(w, problem.Problem{
			Status: http.StatusBadRequest, Code: "RATE_LIMIT_KEY_REQUIRED",
			Title: "The request does not say whom to charge.",
		})
		return
	case errors.Is(err, ErrUnavailable):
		problem.Write(w, problem.Problem{
			Status: http.StatusServiceUnavailable, Code: "RATE_LIMIT_UNAVAILABLE",
			Title: "The rate limit cannot be checked at the moment.", RetryAfter: h.cfg.RetryUnavailable,
		})
	default:
		problem.Write(w, problem.Problem{Status: http.StatusInternalServerError, Code: "INTERNAL"})
	}
	if r.Context().Err() == nil {
		h.cfg.Logger.ErrorContext(r.Context(), "ratelimit: request refused undecided", slog.Any("error", err))
	}
}

func writeDenied(w http.ResponseWriter, d Decision) {
	p := problem.Problem{
		Status:     http.StatusTooManyRequests,
		Code:       "RATE_LIMITED",
		Title:      "Too many requests.",
		RetryAfter: d.RetryAfter,
		Extra:      map[string]any{"violated-policies": []string{d.Denied}},
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

// taken is what a request was charged.
type taken struct {
	limiter Limiter
	charges []Charge
	mu      sync.Mutex
	done    bool
}

type takenKey struct{}

// ChargesFrom returns what the request of ctx was charged, in the form that
// Refund takes, and false outside the middleware.
func ChargesFrom(ctx context.Context) ([]Charge, bool) {
	t, ok := ctx.Value(takenKey{}).(*taken)
	if !ok {
		return nil, false
	}
	return t.charges, true
}

// RefundFrom gives back what the request of ctx was charged, for a request that
// turns out to be free, such as the replay of an answer. Further calls do
// nothing, as does one outside the middleware.
func RefundFrom(ctx context.Context) error {
	t, ok := ctx.Value(takenKey{}).(*taken)
	if !ok {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.done || len(t.charges) == 0 {
		return nil
	}
	if err := t.limiter.Refund(ctx, t.charges...); err != nil {
		return err
	}
	t.done = true
	return nil
}
