package idempotency

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"time"

	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/internal/inctx"
	"github.com/holdfast-go/holdfast/idempotency/internal/sum"
	"github.com/holdfast-go/holdfast/internal/telemetry"
)

// Header is the request header that carries the key.
const Header = "Idempotency-Key"

type middleware struct {
	store  driver.Store
	scope  func(*http.Request) (string, error)
	cfg    MiddlewareConfig
	keys   keyReader
	meter  *meter
	seldom *telemetry.SeldomEach // limits the log lines for each kind of fault
	next   http.Handler
	onLost func(*run) // the method lost, bound once for all requests
	passed inctx.Passed
}

// exchange is one request on its way through the middleware. It holds all state of the request, so that one
// allocation is enough.
type exchange struct {
	run
	m        *middleware
	w        http.ResponseWriter
	r        *http.Request
	came     time.Time
	rec      recorder
	body     body
	bypassed bool
	result   result // how the request ends
	err      error  // why the request was rejected, or its result not stored
}

// NewMiddleware returns the middleware that lets each key reach the handler once. Put authentication, RequireKey and
// rate limits before it, in this order, and panic recovery and compression around it. The package comment lists its
// answers.
//
// scope returns the owner of the request's key: the tenant, the user, the API client. The same key in two scopes is
// two keys. An empty scope without an error is rejected, because it usually means that the user was not
// authenticated. For one scope for all callers see GlobalScope, which needs FingerprintParts. scope may read the
// body.
func NewMiddleware(store driver.Store, scope func(*http.Request) (string, error), cfg MiddlewareConfig) (func(http.Handler) http.Handler, error) {
	cfg = cfg.withDefaults()
	err := cfg.validate()
	switch {
	case scope == nil:
		err = errors.Join(errors.New("idempotency: scope is nil: pass GlobalScope or a function of the request"), err)
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

// storeFor lets a handler that implements driver.Claimer choose the store.
func storeFor(next http.Handler, store driver.Store) driver.Store {
	if claimer, ok := next.(driver.Claimer); ok {
		return claimer.StoreFor(store)
	}
	return store
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

// read makes the claim from the request. The body stays readable: the scope function and FingerprintParts may read it
// too, for example by http.Request.FormValue.
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
		return fmt.Errorf("%w: scope is empty", errScope)
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

// body returns a request's body, already read in full, to the handler.
type body struct{ bytes.Reader }

func (*body) Close() error { return nil }

// trustedLength limits the bytes allocated for a declared length before the bytes arrive.
const trustedLength = 64 << 10

// readBody reads the whole body, of at most limit bytes.
func readBody(w http.ResponseWriter, r *http.Request, limit int64) ([]byte, error) {
	if r.ContentLength > limit {
		return nil, errBodyTooLarge
	}
	size := r.ContentLength + 1 // room to see the end
	if size <= 0 {
		size = bytes.MinRead
	}
	data := make([]byte, 0, min(size, trustedLength))
	for {
		if len(data) == cap(data) {
			data = append(data, 0)[:len(data)]
		}
		room := data[len(data):cap(data)]
		if left := limit - int64(len(data)); int64(len(room)) > left {
			room = room[:left]
		}
		if len(room) == 0 {
			return data, atEnd(w, r.Body)
		}
		n, err := r.Body.Read(room)
		data = data[:len(data)+n]
		if errors.Is(err, io.EOF) {
			return data, nil
		}
		if err != nil {
			return nil, unread(err)
		}
	}
}

// atEnd returns nil if the body has ended. Otherwise MaxBytesReader makes the server close the connection.
func atEnd(w http.ResponseWriter, rest io.ReadCloser) error {
	_, err := http.MaxBytesReader(w, rest, 0).Read(make([]byte, 1))
	if errors.Is(err, io.EOF) {
		return nil
	}
	return unread(err)
}

// unread returns the error for a body that was not read to its end. The limit may belong to a handler around the
// middleware.
func unread(err error) error {
	if _, tooLarge := errors.AsType[*http.MaxBytesError](err); tooLarge {
		return errBodyTooLarge
	}
	return errBodyUnreadable
}

// ask begins the claim in the store or in its fallback.
func (x *exchange) ask() (driver.BeginResult, error) {
	// Detached: a client that disconnects now must not leave a claim without an owner.
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

// serve runs the handler under the claim and closes the claim before the
// client sees a byte.
func (x *exchange) serve() {
	ctx := x.start(x.r.Context(), true)
	defer x.end()
	x.rec.reset(x.w, x.maxBytes, x)
	x.m.meter.active.Add(ctx, 1)
	defer x.m.meter.active.Add(x.r.Context(), -1)

	returned := false
	defer func() {
		if !returned { // the panic continues to its recoverer
			x.finish(x.unkept())
		}
	}()
	x.m.next.ServeHTTP(&x.rec, x.r.WithContext(ctx))
	returned = true

	if x.rec.spilled {
		x.finish(x.unkept())
		return
	}
	if s := x.settled.Load(); s != nil {
		x.finish(nil)
		x.sendSettled(s)
		return
	}
	if x.rec.status == 0 && !x.effect.Load() && ctx.Err() != nil { // cancelled before it wrote anything: not an implicit 200
		x.finish(nil)
		x.rec.rewind()
		x.m.cfg.refuse(x.w, ErrLeaseLost) // its problem fits a deadline too
		return
	}
	resp := x.rec.response(x.m.cfg.KeepHeaders)
	if x.effect.Load() || x.keep(x.rec.status) {
		x.finish(&resp)
	} else {
		x.finish(nil)
	}
	if x.replays() { // another run has completed the key in the meantime
		x.sendSettled(x.settled.Load())
		return
	}
	x.rec.send()
}

// spills records, before the first byte is sent, that the work was done and that its response cannot be kept.
func (x *exchange) spills(status int) {
	hijacked := status == 0
	if hijacked || x.effect.Load() || x.keep(status) {
		x.finish(&driver.Response{})
	}
}

func (x *exchange) replays() bool {
	s := x.settled.Load()
	return s != nil && s.replayed
}

// finish records the end of the run in the store. If that fails, the key stays taken until its lease runs out, and
// the client still gets its answer.
func (x *exchange) finish(resp *driver.Response) {
	if x.closed {
		return
	}
	if x.bypassed {
		x.closed = true // there is no claim to close
		if x.result = resultOfRun(x.settled.Load(), resp, x.refused.Load(), nil); x.result != resultStoreDown {
			x.result = resultBypassed
		}
		return
	}
	x.err = x.close(resp)
	x.result = resultOfRun(x.settled.Load(), resp, x.refused.Load(), x.err)
	if x.err != nil && !x.replays() {
		x.log("idempotency: result could not be stored", x.err)
	}
}

// sendSettled answers from the record that the handler settled. A tombstone of this run is for later requests; this
// request gets the response that the handler wrote.
func (x *exchange) sendSettled(s *settlement) {
	switch {
	case s.replayed:
		x.rec.rewind()
		x.answer(s.record)
	case s.record.Response.Unavailable() && x.rec.status == 0: // the handler left the answer to the middleware, which has none
		x.m.cfg.refuse(x.w, ErrResultUnavailable)
	case s.record.Response.Unavailable():
		x.rec.send()
	default:
		x.rec.WriteHeader(http.StatusOK) // in case the handler wrote nothing
		header := x.w.Header()
		clear(header)
		maps.Copy(header, x.rec.sent)
		header.Del("Content-Length")
		Response(s.record.Response).Send(x.w)
	}
}

// answer serves a request whose key another run has completed or is still processing.
func (x *exchange) answer(out driver.BeginResult) {
	if err := refusal(out, x.claim.Fingerprint); err != nil {
		x.refuse(err)
		return
	}
	x.result, x.err = resultReplayed, nil
	x.m.cfg.OnReplay(x.r)
	x.w.Header().Set(ReplayedHeader, "true")
	Response(out.Response).Send(x.w)
}

// refuse answers with the problem of err.
func (x *exchange) refuse(err error) {
	if errors.Is(err, errScope) {
		x.log("idempotency: scope failed", err)
	}
	x.result, x.err = resultOf(err), err
	x.m.cfg.refuse(x.w, err)
}

// log writes a line about a failure, at most one per kind in a while: during an outage every request fails alike. The
// metrics count each failure.
func (x *exchange) log(msg string, err error) {
	x.m.log(x.r.Context(), &x.run, msg, err)
}

func (m *middleware) log(ctx context.Context, r *run, msg string, err error) {
	if skipped, ok := m.seldom.Due(msg); ok {
		m.cfg.Logger.LogAttrs(ctx, slog.LevelError, msg,
			slog.Any("key", r.claim.Key), slog.Any("error", err), slog.Int("repeats", skipped))
	}
}

// lost logs that a running handler has lost its lease and was cancelled. It runs concurrently with the handler.
func (m *middleware) lost(r *run) {
	m.log(r.work.parent, r, "idempotency: lease lost, handler cancelled", ErrLeaseLost)
}

// done records the end of the request in the metrics.
func (x *exchange) done() {
	x.m.meter.done(x.r.Context(), x.result, time.Since(x.came))
}

// RequireKey returns a middleware that rejects requests whose key is missing or malformed, like NewMiddleware with
// the same Methods, Optional, ParseKey and Documentation of cfg, without using a store. Put it before the rate limit,
// so that a client without a valid key gets its answer without being charged.
func RequireKey(cfg MiddlewareConfig) func(http.Handler) http.Handler {
	cfg = cfg.withDefaults()
	keys := newKeyReader(cfg.ParseKey)
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if cfg.needsKey(r) {
				if _, err := keys.read(r.Header[Header]); err != nil {
					cfg.refuse(w, err)
					return
				}
			}
			next.ServeHTTP(w, r)
		})
	}
}
