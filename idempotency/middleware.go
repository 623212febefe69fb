package idempotency

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/internal/inctx"
	"github.com/holdfast-go/holdfast/idempotency/internal/sum"
	"github.com/holdfast-go/holdfast/internal/telemetry"
)

// Header is the request header that carries the key.
const Header = "Idempotency-Key"

// NewMiddleware returns the middleware that lets each key reach the handler
// once. Put authentication, RequireKey and rate limits before it, in this order,
// and panic recovery and compression around it. The package's doc says how it
// answers.
//
// scope returns the part of the world in which the request's key is unique: the
// tenant, the user, the API client. A key of one scope is never confused with the same key of
// another. An empty scope without an error is refused, since it is most often a
// user that was not authenticated; see GlobalScope,
// which needs FingerprintParts. It may read the body.
func NewMiddleware(store driver.Store, scope func(*http.Request) (string, error), cfg MiddlewareConfig) (func(http.Handler) http.Handler, error) {
	cfg = cfg.withDefaults()
	err := cfg.validate()
	switch {
	case scope == nil:
		err = errors.Join(errors.New("idempotency: scope is nil: GlobalScope or a function of the request is needed"), err)
	case isGlobalScope(scope) && cfg.FingerprintParts == nil:
		err = errors.Join(errUnsafe, err)
	}
	if store == nil {
		err = errors.Join(errors.New("idempotency: store is nil"), err)
	}
	if err != nil {
		return nil, err
	}
	meter, err := newMeter(cfg.MeterProvider)
	if err != nil {
		return nil, err
	}
	seldom := &telemetry.SeldomEach{}
	return func(next http.Handler) http.Handler {
		m := &middleware{store: storeFor(next, store), scope: scope, cfg: cfg, keys: newKeyReader(cfg.ParseKey), meter: meter, seldom: seldom, next: next}
		m.passed = inctx.Passed{MaxRequestBytes: cfg.MaxRequestBytes, Keep: cfg.Keep, Documentation: cfg.Documentation}
		m.onLost = m.lost
		return m
	}, nil
}

// storeFor lets a handler that asks for the key itself say so.
func storeFor(next http.Handler, store driver.Store) driver.Store {
	if claimer, ok := next.(driver.Claimer); ok {
		return claimer.StoreFor(store)
	}
	return store
}

type middleware struct {
	store  driver.Store
	scope  func(*http.Request) (string, error)
	cfg    MiddlewareConfig
	keys   keyReader
	meter  *meter
	seldom *telemetry.SeldomEach // a line of log a while for each kind of fault
	next   http.Handler
	onLost func(*run) // lost, made once for all requests
	passed inctx.Passed
}

func (m *middleware) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !m.cfg.needsKey(r) {
		ctx := context.WithValue(r.Context(), inctx.PassedKey{}, &m.passed)
		m.next.ServeHTTP(w, r.WithContext(ctx))
		return
	}
	x := &exchange{m: m, w: w, r: r, came: time.Now(), result: resultInvalid}
	x.store, x.keep, x.maxBytes, x.onLost = m.store, m.cfg.Keep, m.cfg.MaxResponseBytes, m.onLost
	x.docs = m.cfg.Documentation
	defer x.done()
	if err := x.read(); err != nil {
		x.refuse(err)
		return
	}
	out, err := x.ask()
	switch {
	case err != nil:
		x.refuse(err)
	case out.State == driver.Acquired:
		x.serve()
	default:
		x.answer(out)
	}
}

// read takes the claim from the request, whose body stays readable: Scope and
// FingerprintParts may read it, too, as http.Request.FormValue does.
func (x *exchange) read() error {
	key, err := x.m.keys.read(x.r.Header[Header])
	if err != nil {
		return err
	}
	cfg := &x.m.cfg
	var data []byte
	if x.r.Body != nil && x.r.Body != http.NoBody {
		if data, err = readBody(x.w, x.r, cfg.MaxRequestBytes); err != nil {
			return err
		}
		x.body.Reset(data)
		x.r.Body = &x.body
	}
	scope, err := x.m.scope(x.r)
	x.body.Reset(data)
	switch {
	case errors.Is(err, errGlobalUnsafe):
	case errors.Is(err, errGlobal) && cfg.FingerprintParts == nil:
		return fmt.Errorf("%w: %w", errScope, errUnsafe)
	case errors.Is(err, errGlobal):
	case err != nil:
		return fmt.Errorf("%w: %w", errScope, err)
	case scope == "":
		return fmt.Errorf("%w: it is empty", errScope)
	default:
		key = key.In(scope)
	}
	var parts []string
	if cfg.FingerprintParts != nil {
		parts = cfg.FingerprintParts(x.r)
		x.body.Reset(data)
	}
	version, digits := sum.OfRequest(x.r, data, parts, cfg.CanonicalJSON)
	x.claim = driver.NewClaim(driver.Key(key), driver.Fingerprint{Version: version, Sum: digits})
	return nil
}

// ask begins the claim, in the store or in what stands behind it.
func (x *exchange) ask() (driver.BeginResult, error) {
	// A client that hangs up now must not leave a claim that nobody knows of.
	x.first = lazyContext{parent: x.r.Context(), detached: true}
	out, err := x.begin(&x.first, time.Now())
	if err == nil {
		return out, nil
	}
	x.log("idempotency: store is unavailable", err)
	if x.fallBack(err) {
		x.m.meter.fellBack.Add(x.r.Context(), 1)
		second := &lazyContext{parent: x.r.Context(), detached: true}
		if out, err = x.begin(second, time.Now()); err == nil {
			return out, nil
		}
		x.log("idempotency: fallback is unavailable", err)
	}
	if !errors.Is(err, driver.ErrForeignRecord) && x.m.cfg.FailOpen(x.r) {
		x.bypassed = true
		x.w.Header().Set(bypassedHeader, "true")
		return driver.BeginResult{State: driver.Acquired}, nil
	}
	return driver.BeginResult{}, err
}

// log writes a line about a failure, unless there was one about its like just before:
// while a store is down every request fails alike. The metrics count each.
func (x *exchange) log(msg string, err error) {
	x.m.log(x.r.Context(), &x.run, msg, err)
}

func (m *middleware) log(ctx context.Context, r *run, msg string, err error) {
	if skipped, ok := m.seldom.Due(msg); ok {
		m.cfg.Logger.LogAttrs(ctx, slog.LevelError, msg,
			slog.Any("key", r.claim.Key), slog.Any("error", err), slog.Int("skipped", skipped))
	}
}

// lost reports that a running handler has lost its key, and has been cancelled. It
// runs beside the handler.
func (m *middleware) lost(r *run) {
	m.log(r.work.parent, r, "idempotency: lease lost, the handler is cancelled", ErrLeaseLost)
}

// done reports the end of the request.
func (x *exchange) done() {
	x.m.meter.done(x.r.Context(), x.result, time.Since(x.came))
}
