package idempotency

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"time"

	"go.opentelemetry.io/otel/metric"
)

// Scope returns the part of the world in which the request's key is unique:
// the tenant, the user, the API client. A key of one scope never meets the same
// key of another. An empty scope without an error is refused, since it is most
// often a user that was not authenticated; see GlobalScope. It may read the body.
type Scope func(r *http.Request) (string, error)

// errGlobal is how GlobalScope answers; no other scope can be taken for it.
var errGlobal = errors.New("idempotency: scope is global")

// GlobalScope is the scope of a service whose keys are unique among all its
// callers: stores then see the literal key. Two callers who send the same key
// would share its answer, so put the caller into MiddlewareConfig.FingerprintParts:
// the second one is then refused with 422.
func GlobalScope(*http.Request) (string, error) { return "", errGlobal }

// MiddlewareConfig is the configuration of NewMiddleware. Scope is required;
// every other field has a default.
type MiddlewareConfig struct {
	// Scope is required: GlobalScope or a function of the request.
	Scope Scope
	// Need says, by method and route, whether a request needs a key. It must not
	// read the body. nil: DefaultNeed.
	Need func(r *http.Request) Need
	// FingerprintParts adds to the fingerprint, such as the user in a global
	// scope. All callers without a user are one caller. It may read the body. nil
	// adds nothing.
	FingerprintParts func(r *http.Request) []string
	// CanonicalJSON makes JSON bodies the same request when they differ only in
	// white space, the order of members, or escapes. Other bodies, and every body
	// without it, count byte by byte. Changing it leaves stored keys valid, and
	// their bodies uncompared.
	CanonicalJSON bool
	// Keep says which statuses are final, so that their response is kept and
	// replayed. After any other one the key is free, and the same key runs the
	// handler again: such an answer must not have had an effect, unless MarkEffect
	// was called. nil: DefaultKeep.
	Keep func(status int) bool
	// TombstonePanics has a panic leave a tombstone, as after MarkEffect. false:
	// it frees the key. In both cases the panic goes on.
	TombstonePanics bool
	// KeepHeaders are the response headers kept with the body. nil: those that
	// describe the body (X-Content-Type-Options is one), and Location, Link, ETag,
	// Last-Modified and Cache-Control. Naming one that must never be replayed, such as
	// Set-Cookie, is an error.
	KeepHeaders []string
	// MaxRequestBytes bounds the request's body; more is answered with 413.
	// 0: 1 MiB.
	MaxRequestBytes int64
	// MaxResponseBytes bounds what is kept of a response, headers and body. A
	// longer one is sent, and leaves a tombstone. 0: 1 MiB.
	MaxResponseBytes int
	// StoreDown says, by route, what becomes of a request when the store cannot
	// be asked. nil: FallBack where there is a Fallback, else FailClosed.
	StoreDown func(r *http.Request) StoreDown
	// Fallback is the store that FallBack asks. It must know by itself what the
	// other one knows: idempotencypgx.Runner.Fallback does. nil: none.
	Fallback Store
	// StoreTimeout bounds one call to the store. 0: 5 s.
	StoreTimeout time.Duration
	// OnReplay is called before a kept response is sent once more, such as to
	// give the caller's unit of a rate limit back. A replay is work, too: what is
	// given back must have a bound, as ratelimit.RefundFrom has. nil: nothing.
	OnReplay func(r *http.Request)
	// Hooks are callbacks for observation.
	Hooks Hooks
	// Logger; nil: slog.Default().
	Logger *slog.Logger
	// MeterProvider; nil: the global one.
	MeterProvider metric.MeterProvider
}

func (c MiddlewareConfig) withDefaults() MiddlewareConfig {
	if c.Need == nil {
		c.Need = DefaultNeed
	}
	if c.StoreDown == nil {
		down := FailClosed
		if c.Fallback != nil {
			down = FallBack
		}
		c.StoreDown = func(*http.Request) StoreDown { return down }
	}
	if c.FingerprintParts == nil {
		c.FingerprintParts = func(*http.Request) []string { return nil }
	}
	if c.Keep == nil {
		c.Keep = DefaultKeep
	}
	if c.KeepHeaders == nil {
		c.KeepHeaders = defaultKeepHeaders
	}
	if c.MaxRequestBytes == 0 {
		c.MaxRequestBytes = 1 << 20
	}
	if c.MaxResponseBytes == 0 {
		c.MaxResponseBytes = 1 << 20
	}
	if c.StoreTimeout == 0 {
		c.StoreTimeout = defaultStoreTimeout
	}
	if c.OnReplay == nil {
		c.OnReplay = func(*http.Request) {}
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	c.KeepHeaders = slices.Clone(c.KeepHeaders)
	for i, name := range c.KeepHeaders {
		c.KeepHeaders[i] = http.CanonicalHeaderKey(name)
	}
	slices.Sort(c.KeepHeaders)
	c.KeepHeaders = slices.Compact(c.KeepHeaders) // keepHeader counts them
	return c
}

func (c MiddlewareConfig) validate() error {
	var errs []error
	if c.Scope == nil {
		errs = append(errs, errors.New("idempotency: Scope is required: GlobalScope or a function of the request"))
	}
	for _, name := range c.KeepHeaders {
		if denied(name) {
			errs = append(errs, fmt.Errorf("idempotency: KeepHeaders: %s must never be replayed", name))
		}
	}
	if c.MaxRequestBytes < 0 {
		errs = append(errs, errors.New("idempotency: MaxRequestBytes is negative"))
	}
	if c.MaxResponseBytes < 0 {
		errs = append(errs, errors.New("idempotency: MaxResponseBytes is negative"))
	}
	if c.StoreTimeout < 0 {
		errs = append(errs, errors.New("idempotency: StoreTimeout is negative"))
	}
	return errors.Join(errs...)
}
