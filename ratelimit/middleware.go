package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/holdfast-go/holdfast/internal/problem"
	"github.com/holdfast-go/holdfast/internal/telemetry"
)

// quotaExceeded is the problem type of the header draft.
const quotaExceeded = "https://iana.org/assignments/http-problem-types#quota-exceeded"

// MiddlewareConfig configures NewMiddleware. The zero value works.
type MiddlewareConfig struct {
	// LegacyHeaders also sends X-RateLimit-Limit, X-RateLimit-Remaining and X-RateLimit-Reset, in seconds from now,
	// of the limit with the smallest share left.
	LegacyHeaders bool

	// Shadow is called for each denial instead of rejecting the request, to try limits out. Every request is served,
	// no header is sent, and denials are counted as shadow. Use a separate middleware for such limits. Optional.
	Shadow func(r *http.Request, d Decision)

	// Logger is for errors that the client does not see: one line in 10 s, with the number of skipped lines. Default:
	// slog.Default().
	Logger *slog.Logger

	// MeterProvider is for the counter holdfast.ratelimit.requests. Default: the global one.
	MeterProvider metric.MeterProvider
}

// NewMiddleware returns HTTP middleware that charges requests to l. charges returns the charges of a request: limits
// and costs may depend on its route, its user and the user's plan. Without charges the request passes.
//
// A denied request gets 429 with the code RATE_LIMITED, the violated limits and Retry-After. A request without a
// decision gets 503 RATE_LIMIT_UNAVAILABLE. If charges returns an error, the request is rejected: with the error's
// own code and status if it has the methods Code() string and HTTPStatus() int, like ErrNoKey, and with 500
// otherwise. Decided requests get the headers RateLimit-Policy and RateLimit of version 10 of
// draft-ietf-httpapi-ratelimit-headers.
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
		Int64Counter("holdfast.ratelimit.requests", metric.WithDescription("Requests by outcome and by the limit that denied."), metric.WithUnit("{request}"))
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
	refunds  *Memory // counts refunds, with ten times the same limits
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

// undecided answers a request without a decision.
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

// HeaderKey returns a key function that reads the key from a request header, which a gateway or an authentication
// layer sets. A header that is missing, empty or sent twice is ErrNoKey.
func HeaderKey(name string) func(*http.Request) (string, error) {
	return func(r *http.Request) (string, error) {
		values := r.Header.Values(name)
		if len(values) != 1 || values[0] == "" {
			return "", fmt.Errorf("%w: header %s", ErrNoKey, name)
		}
		return values[0], nil
	}
}

// taken holds the charges of a request.
type taken struct {
	limiter  Limiter
	refunds  Limiter // limits the refunds
	decision Decision
	header   http.Header // of the answer; nil in shadow
	legacy   bool
	outer    *taken // from another middleware around this one

	mu   sync.Mutex
	done bool
}

type takenKey struct{}

// remember lets the inner handlers find the charges of the request.
func (h *handler) remember(w http.ResponseWriter, r *http.Request, d Decision) *http.Request {
	t := &taken{limiter: h.limiter, refunds: h.refunds, decision: d, legacy: h.cfg.LegacyHeaders}
	if h.cfg.Shadow == nil {
		t.header = w.Header()
	}
	t.outer, _ = r.Context().Value(takenKey{}).(*taken)
	return r.WithContext(context.WithValue(r.Context(), takenKey{}, t))
}

// RefundFrom refunds the charges of the request of ctx. Use it for a request that turns out to be free, such as the
// replay of an answer. It also works if the client has disconnected. Call it before the answer is written, so that
// the headers show the refund. Further calls do nothing, even after ErrUnavailable: a second refund could return
// units of other requests. Outside the middleware it does nothing.
//
// For each limit and key a process refunds at most ten times as much as the limit admits, because free requests must
// be limited too. Requests beyond that stay charged, which is no error.
func RefundFrom(ctx context.Context) error {
	var errs []error
	for t, _ := ctx.Value(takenKey{}).(*taken); t != nil; t = t.outer {
		errs = append(errs, t.refund(ctx))
	}
	return errors.Join(errs...)
}

func (t *taken) refund(ctx context.Context) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	charges := t.decision.Charges()
	if t.done || len(charges) == 0 {
		return nil
	}
	t.done = true
	ctx = context.WithoutCancel(ctx)
	if d, err := t.refunds.Allow(ctx, allowances(charges)...); err != nil || !d.Allowed {
		return err
	}
	if err := t.limiter.Refund(ctx, charges...); err != nil {
		return err
	}
	if t.header != nil {
		writeHeaders(t.header, t.decision.refunded(), t.legacy)
	}
	return nil
}

// refundsPerUnit is the number of refunded units for each unit that a limit admits.
const refundsPerUnit = 10

// allowances returns charges to the limits of the refunds.
func allowances(charges []Charge) []Charge {
	wider := slices.Clone(charges)
	for i := range wider {
		l := &wider[i].Limit
		l.Max, l.Burst = refundsPerUnit*l.Max, refundsPerUnit*l.Burst
		if l.Validate() != nil { // too large to count exactly
			*l = charges[i].Limit
		}
	}
	return wider
}

// writeHeaders writes the limits for the client in the form of draft-ietf-httpapi-ratelimit-headers-10, and with
// legacy also in the X-RateLimit- fields.
func writeHeaders(h http.Header, d Decision, legacy bool) {
	writeDraft10(h, d)
	if legacy {
		writeLegacy(h, d)
	}
}

// writeDraft10 writes every limit into two structured lists: q is its quota, w its window in seconds, r its remaining
// units, t the seconds until more are available.
func writeDraft10(h http.Header, d Decision) {
	var policySpace, stateSpace [128]byte
	policy, state := policySpace[:0], stateSpace[:0]
	for i, p := range d.parts() {
		s := d.state(p)
		if d.outdone(i, s) {
			continue
		}
		if len(policy) > 0 {
			policy, state = append(policy, ", "...), append(state, ", "...)
		}
		policy = appendItem(policy, s.Name, ";q=", s.Max, ";w=", s.Window)
		state = appendItem(state, s.Name, ";r=", s.Remaining, ";t=", s.Reset)
	}
	if len(policy) > 0 {
		h.Set("RateLimit-Policy", string(policy))
		h.Set("RateLimit", string(state))
	}
}

// outdone reports whether another part of the same limit, charged for another key, has fewer units left: the draft
// requires one item per limit.
func (d *Decision) outdone(i int, s State) bool {
	for j, p := range d.parts() {
		if j == i || p.rule.Name != s.Name {
			continue
		}
		if left := d.state(p).Remaining; left < s.Remaining || left == s.Remaining && j < i {
			return true
		}
	}
	return false
}

// appendItem needs no escapes, because names are plain.
func appendItem(b []byte, name, of string, n int64, within string, d time.Duration) []byte {
	b = append(append(append(b, '"'), name...), '"')
	b = strconv.AppendInt(append(b, of...), n, 10)
	return strconv.AppendInt(append(b, within...), seconds(d), 10)
}

// writeLegacy writes the limit with the smallest share left.
func writeLegacy(h http.Header, d Decision) {
	s, ok := d.Binding()
	if !ok {
		return
	}
	h.Set("X-RateLimit-Limit", strconv.FormatInt(s.Max, 10))
	h.Set("X-RateLimit-Remaining", strconv.FormatInt(s.Remaining, 10))
	h.Set("X-RateLimit-Reset", strconv.FormatInt(seconds(s.Reset), 10))
}

// seconds rounds up, so that a client that obeys is never too early.
func seconds(d time.Duration) int64 { return int64((d + time.Second - 1) / time.Second) }
