package idempotency

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"reflect"
	"slices"
	"strings"

	"go.opentelemetry.io/otel/metric"

	"github.com/holdfast-go/holdfast/idempotency/internal/headers"
)

// The global scopes return these errors, so no scope string can be mistaken for them.
var (
	errGlobal       = errors.New("idempotency: scope is global")
	errGlobalUnsafe = errors.New("idempotency: scope is global for every caller")
)

// GlobalScope is the scope of a service whose keys are unique among all its callers. Stores then see the literal key.
// Two callers with the same key would share its answer, so MiddlewareConfig.FingerprintParts must include the caller:
// the second one then gets 422. Without FingerprintParts, NewMiddleware returns an error.
func GlobalScope(*http.Request) (string, error) { return "", errGlobal }

// UnsafeGlobalScope is GlobalScope without the need for FingerprintParts: a caller who sends another caller's key
// with the same request gets that answer. Use it only if there is a single caller.
func UnsafeGlobalScope(*http.Request) (string, error) { return "", errGlobalUnsafe }

// errUnsafe rejects a GlobalScope that would share answers between callers.
var errUnsafe = errors.New("idempotency: GlobalScope: FingerprintParts is nil: callers who send the same key would share its answer; " +
	"add the caller to FingerprintParts, or use UnsafeGlobalScope for a single caller")

// isGlobalScope reports whether scope is GlobalScope itself. A function that wraps GlobalScope is recognized later,
// by the error it returns.
func isGlobalScope(scope func(*http.Request) (string, error)) bool {
	return reflect.ValueOf(scope).Pointer() == reflect.ValueOf(GlobalScope).Pointer()
}

// MiddlewareConfig configures NewMiddleware. The zero value is usable.
type MiddlewareConfig struct {
	// Methods lists the methods that need a key; requests with other methods pass unchanged. Default: POST, PUT and
	// PATCH.
	Methods []string
	// Optional lets requests without a key pass unchanged. Default: they get 400.
	Optional bool
	// ParseKey reads the header Idempotency-Key: ParseKey, ParseUUID, ParseOpaque, or a function that returns the
	// result of one of them, for example only for UUIDs of version 7. Default: ParseKey.
	ParseKey func(header string) (Key, error)
	// FingerprintParts returns more parts for the fingerprint, such as the user under a global scope. Requests with
	// equal parts count as the same caller. It may read the body. Optional.
	FingerprintParts func(r *http.Request) []string
	// CanonicalJSON treats JSON bodies as the same request if they differ only in white space, the order of members,
	// or escapes. If you change it, stored keys stay valid, but their bodies are not compared. Default: bodies are
	// compared byte by byte.
	CanonicalJSON bool
	// Keep reports whether a status is final; a final response is kept and replayed. After any other status the key
	// is free, and the same key runs the handler again. Such an answer must not have had an effect, unless MarkEffect
	// was called. Default: every status except 5xx, 401, 408, 425, 429 and 499.
	Keep func(status int) bool
	// KeepHeaders lists the response headers kept with the body. A header that must never be replayed, such as
	// Set-Cookie, is an error. Default: headers that describe the body (including X-Content-Type-Options), and
	// Location, Link, ETag, Last-Modified and Cache-Control.
	KeepHeaders []string
	// MaxRequestBytes limits the request's body, in bytes. A longer body gets 413. Default: 1 MiB.
	MaxRequestBytes int64
	// MaxResponseBytes limits a kept response, headers and body, in bytes. A longer response is sent but not kept,
	// and later requests get 409. Default: 1 MiB.
	MaxResponseBytes int
	// FailOpen reports whether the handler may run without protection while the store and its fallback are
	// unavailable. The response then carries Idempotency-Bypassed: true and is not kept. Default: the request gets
	// 503 and nothing is done.
	FailOpen func(r *http.Request) bool
	// OnReplay is called before a kept response is sent again, for example to refund the caller's unit of a rate
	// limit. A replay costs work too, so refunds must be limited, as ratelimit.RefundFrom does. Optional.
	OnReplay func(r *http.Request)
	// Documentation is the URL of the page that problems link to in their member type. The fragment of a link is the
	// code in lower case. Default: the page of this project.
	Documentation string
	// Logger. Default: slog.Default().
	Logger *slog.Logger
	// MeterProvider. Default: the global one.
	MeterProvider metric.MeterProvider
}

// defaultMaxBytes bounds bodies and kept responses.
const defaultMaxBytes = 1 << 20

func (c MiddlewareConfig) withDefaults() MiddlewareConfig {
	if c.Methods == nil {
		c.Methods = []string{http.MethodPost, http.MethodPut, http.MethodPatch}
	}
	if c.ParseKey == nil {
		c.ParseKey = ParseKey
	}
	if c.FailOpen == nil {
		c.FailOpen = func(*http.Request) bool { return false }
	}
	if c.Keep == nil {
		c.Keep = defaultKeep
	}
	if c.KeepHeaders == nil {
		c.KeepHeaders = defaultKeepHeaders
	}
	if c.MaxRequestBytes == 0 {
		c.MaxRequestBytes = defaultMaxBytes
	}
	if c.MaxResponseBytes == 0 {
		c.MaxResponseBytes = defaultMaxBytes
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
	c.KeepHeaders = slices.Compact(c.KeepHeaders) // keepHeader relies on unique names
	return c
}

func (c MiddlewareConfig) validate() error {
	var errs []error
	for _, name := range c.KeepHeaders {
		if headers.Denied(name) {
			errs = append(errs, fmt.Errorf("idempotency: KeepHeaders: %s must never be replayed", name))
		}
	}
	if u, err := url.Parse(c.Documentation); err != nil || c.Documentation != "" && (u.Host == "" || strings.Contains(c.Documentation, "#")) {
		errs = append(errs, errors.New("idempotency: Documentation must be an absolute URL without a fragment"))
	}
	if c.MaxRequestBytes < 0 {
		errs = append(errs, errors.New("idempotency: MaxRequestBytes is negative"))
	}
	if c.MaxResponseBytes < 0 {
		errs = append(errs, errors.New("idempotency: MaxResponseBytes is negative"))
	}
	return errors.Join(errs...)
}

// needsKey reports whether the request must have a valid key.
func (c *MiddlewareConfig) needsKey(r *http.Request) bool {
	for _, method := range c.Methods {
		if method == r.Method {
			return !c.Optional || len(r.Header[Header]) > 0
		}
	}
	return false
}

// clientClosedRequest is nginx's status for a request whose client has disconnected. Some handlers use it too.
const clientClosedRequest = 499

// defaultKeep keeps every status except 5xx, 401, 408, 425, 429 and 499, which mean that the request may succeed
// later.
func defaultKeep(status int) bool {
	switch status {
	case http.StatusUnauthorized, http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests, clientClosedRequest:
		return false
	}
	return status < 500
}
