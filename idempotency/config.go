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

// How the global scopes answer; no other scope can be taken for one.
var (
	errGlobal       = errors.New("idempotency: scope is global")
	errGlobalUnsafe = errors.New("idempotency: scope is global, whoever calls")
)

// GlobalScope is the scope of a service whose keys are unique among all its
// callers: stores then see the literal key. Two callers who send the same key
// would share its answer, so MiddlewareConfig.FingerprintParts must hold the caller:
// the second one is then refused with 422. Without FingerprintParts it is refused
// by NewMiddleware.
func GlobalScope(*http.Request) (string, error) { return "", errGlobal }

// UnsafeGlobalScope is GlobalScope with or without FingerprintParts: whoever sends a
// key of somebody else, with the same request, gets that answer. It is right where
// there is one caller alone.
func UnsafeGlobalScope(*http.Request) (string, error) { return "", errGlobalUnsafe }

// errUnsafe refuses a GlobalScope that shares answers among callers.
var errUnsafe = errors.New("idempotency: GlobalScope needs FingerprintParts with the caller in them: " +
	"without, whoever sends a key of somebody else gets that answer (UnsafeGlobalScope, where this is right)")

// isGlobalScope knows GlobalScope itself; a function that calls it is found out by
// what it returns.
func isGlobalScope(scope func(*http.Request) (string, error)) bool {
	return reflect.ValueOf(scope).Pointer() == reflect.ValueOf(GlobalScope).Pointer()
}

// MiddlewareConfig configures NewMiddleware. The zero value is usable.
type MiddlewareConfig struct {
	// Methods are those whose requests need a key; requests of other methods pass
	// untouched. Default: POST, PUT and PATCH.
	Methods []string
	// Optional lets requests without a key pass untouched. Default: they are refused
	// with 400.
	Optional bool
	// ParseKey reads the header Idempotency-Key: ParseKey, ParseUUID, ParseOpaque, or a
	// function that returns what one of them returns, such as for UUIDs of version 7 alone.
	// Default: ParseKey.
	ParseKey func(header string) (Key, error)
	// FingerprintParts adds to the fingerprint, such as the user in a global scope. All
	// callers without a user are one caller. It may read the body. Optional.
	FingerprintParts func(r *http.Request) []string
	// CanonicalJSON makes JSON bodies the same request when they differ only in white
	// space, the order of members, or escapes. Changing it leaves stored keys valid, and
	// their bodies uncompared. Default: every body counts byte by byte.
	CanonicalJSON bool
	// Keep says which statuses are final, so that their response is kept and replayed.
	// After any other one the key is free, and the same key runs the handler again: such
	// an answer must not have had an effect, unless MarkEffect was called. Default: every
	// status but 5xx and 401, 408, 425, 429 and 499.
	Keep func(status int) bool
	// KeepHeaders are the response headers kept with the body. Naming one that must never
	// be replayed, such as Set-Cookie, is an error. Default: those that describe the body
	// (X-Content-Type-Options is one), and Location, Link, ETag, Last-Modified and
	// Cache-Control.
	KeepHeaders []string
	// MaxRequestBytes bounds the request's body; more is answered with 413.
	// Default: 1 MiB.
	MaxRequestBytes int64
	// MaxResponseBytes bounds what is kept of a response, headers and body. A longer one
	// is sent, and leaves a tombstone. Default: 1 MiB.
	MaxResponseBytes int
	// FailOpen says whether the handler runs without protection when the store, and what
	// stands behind it, cannot be asked. The response then carries
	// Idempotency-Bypassed: true and is not kept. Default: 503, nothing was done.
	FailOpen func(r *http.Request) bool
	// OnReplay is called before a kept response is sent once more, such as to give the
	// caller's unit of a rate limit back. A replay is work, too: what is given back must
	// have a bound, as ratelimit.RefundFrom has. Optional.
	OnReplay func(r *http.Request)
	// Documentation is the URL of the document that problems link to in their member type,
	// each at the heading that is its code, in lower case. Default: that of this project.
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
	c.KeepHeaders = slices.Compact(c.KeepHeaders) // keepHeader counts them
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
		errs = append(errs, errors.New("idempotency: Documentation is no absolute URL without a fragment"))
	}
	if c.MaxRequestBytes < 0 {
		errs = append(errs, errors.New("idempotency: MaxRequestBytes is negative"))
	}
	if c.MaxResponseBytes < 0 {
		errs = append(errs, errors.New("idempotency: MaxResponseBytes is negative"))
	}
	return errors.Join(errs...)
}

// needsKey reports whether the request has to have a usable key.
func (c *MiddlewareConfig) needsKey(r *http.Request) bool {
	for _, method := range c.Methods {
		if method == r.Method {
			return !c.Optional || len(r.Header[Header]) > 0
		}
	}
	return false
}

// clientClosedRequest is what nginx, and handlers after it, call a request whose client has gone.
const clientClosedRequest = 499

// defaultKeep keeps every status but 5xx and 401, 408, 425, 429 and 499, which say
// that the request may succeed another time.
func defaultKeep(status int) bool {
	switch status {
	case http.StatusUnauthorized, http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests, clientClosedRequest:
		return false
	}
	return status < 500
}
