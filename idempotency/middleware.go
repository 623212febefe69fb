package idempotency

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"github.com/holdfast-go/holdfast/internal/telemetry"
)

// Header is the request header that carries the key.
const Header = "Idempotency-Key"

// NewMiddleware returns the middleware that lets each key reach the handler
// once. Put authentication, RequireKey and rate limits before it, in this order,
// and panic recovery and compression around it. How it answers is told in the
// package's story.
func NewMiddleware(store Store, cfg MiddlewareConfig) (func(http.Handler) http.Handler, error) {
	cfg = cfg.withDefaults()
	err := cfg.validate()
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
		return &middleware{store: store, cfg: cfg, meter: meter, seldom: seldom, next: next}
	}, nil
}

type middleware struct {
	store  Store
	cfg    MiddlewareConfig
	meter  *meter
	seldom *telemetry.SeldomEach // a line of log a while for each kind of fault
	next   http.Handler
}

func (m *middleware) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !needed(m.cfg.Need, r) {
		m.next.ServeHTTP(w, r)
		return
	}
	x := &exchange{m: m, w: w, r: r, came: time.Now(), result: ResultInvalid}
	x.store, x.timeout, x.onLost = m.store, m.cfg.StoreTimeout, m.cfg.Hooks.OnLeaseLost
	defer x.done()
	if err := x.read(); err != nil {
		x.refuse(err)
		return
	}
	out, err := x.ask()
	switch {
	case err != nil:
		x.refuse(err)
	case out.State == Acquired:
		x.serve()
	default:
		x.answer(out)
	}
}

// read takes the claim from the request, whose body stays readable: Scope and
// FingerprintParts may read it, too, as http.Request.FormValue does.
func (x *exchange) read() error {
	key, err := keyFrom(x.r.Header)
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
	scope, err := cfg.Scope(x.r)
	x.body.Reset(data)
	switch {
	case errors.Is(err, errGlobal):
	case err != nil:
		return fmt.Errorf("%w: %w", errScope, err)
	case scope == "":
		return fmt.Errorf("%w: it is empty", errScope)
	default:
		key = key.In(scope)
	}
	parts := cfg.FingerprintParts(x.r)
	x.body.Reset(data)
	x.claim = NewClaim(key, requestFingerprint(x.r, data, parts, cfg.CanonicalJSON))
	return nil
}

// keyFrom refuses a header that is there twice: two readers of the request
// might take two different keys from it.
func keyFrom(h http.Header) (Key, error) {
	switch values := h[Header]; len(values) {
	case 0:
		return "", errKeyRequired
	case 1:
		return ParseKey(values[0])
	}
	return "", ErrKeyInvalid
}

// ask begins the claim, in the store or in what takes its place.
func (x *exchange) ask() (Outcome, error) {
	// A client that hangs up now must not leave a claim that nobody knows of.
	x.first = lazyContext{parent: x.r.Context(), detached: true}
	out, err := x.begin(&x.first, time.Now())
	if err == nil {
		return out, nil
	}
	x.log("idempotency: store is unavailable", err)
	switch down := x.m.cfg.StoreDown(x.r); {
	case down == FailOpen:
		x.bypassed = true
		x.w.Header().Set(BypassedHeader, "true")
		return Outcome{State: Acquired}, nil
	case down == FallBack && x.m.cfg.Fallback != nil:
		x.fellBack, x.store = true, x.m.cfg.Fallback
		second := &lazyContext{parent: x.r.Context(), detached: true}
		if out, err = x.begin(second, time.Now()); err == nil {
			return out, nil
		}
		x.log("idempotency: fallback is unavailable", err)
	}
	return Outcome{}, err
}

// log writes a line about a failure, unless there was one about its like just before:
// while a store is down every request fails alike. Hooks.OnDone sees each.
func (x *exchange) log(msg string, err error) {
	if skipped, ok := x.m.seldom.Due(msg); ok {
		x.m.cfg.Logger.LogAttrs(x.r.Context(), slog.LevelError, msg,
			slog.Any("key", x.claim.Key), slog.Any("error", err), slog.Int("skipped", skipped))
	}
}

func (x *exchange) acquired(ctx context.Context) {
	x.m.meter.active.Add(ctx, 1)
	if hook := x.m.cfg.Hooks.OnAcquired; hook != nil {
		hook(ctx, x.claim)
	}
}

// done reports the end of the request.
func (x *exchange) done() {
	took := time.Since(x.came)
	x.m.meter.done(x.r.Context(), x.result, took)
	if hook := x.m.cfg.Hooks.OnDone; hook != nil {
		hook(x.r.Context(), Done{Key: x.claim.Key, Result: x.result, Duration: took, FellBack: x.fellBack, Err: x.err})
	}
}
