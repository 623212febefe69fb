package idempotency

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"time"
)

// Header is the request header that carries the key.
const Header = "Idempotency-Key"

// NewMiddleware returns the middleware that lets each key reach the handler
// once. Put authentication and rate limits before it and panic recovery and
// compression around it. How it answers is told in the package's story.
func NewMiddleware(store Store, cfg MiddlewareConfig) (func(http.Handler) http.Handler, error) {
	cfg = cfg.withDefaults()
	err := cfg.validate()
	if store == nil {
		err = errors.Join(errors.New("idempotency: store is nil"), err)
	}
	if err != nil {
		return nil, err
	}
	count, err := newCounter(cfg.MeterProvider)
	if err != nil {
		return nil, err
	}
	return func(next http.Handler) http.Handler {
		return &middleware{store: store, cfg: cfg, count: count, next: next}
	}, nil
}

type middleware struct {
	store Store
	cfg   MiddlewareConfig
	count *counter
	next  http.Handler
}

func (m *middleware) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !slices.Contains(m.cfg.Methods, r.Method) {
		m.next.ServeHTTP(w, r)
		return
	}
	claim, err := m.read(w, r)
	if err != nil {
		m.refuse(w, r, err)
		return
	}
	begun := time.Now()
	// A client that hangs up now must not leave a claim that nobody knows of.
	out, err := begin(context.WithoutCancel(r.Context()), m.store, claim, m.cfg.StoreTimeout)
	switch {
	case err != nil:
		m.cfg.Logger.ErrorContext(r.Context(), "idempotency: store is unavailable",
			slog.Any("key", claim.Key), slog.Any("error", err))
		m.refuse(w, r, errStoreUnavailable)
	case out.State == Acquired:
		m.serve(w, r, claim, out.Lease, begun)
	default:
		m.answer(w, r, claim, out)
	}
}

// read takes the claim from the request, whose body stays readable.
func (m *middleware) read(w http.ResponseWriter, r *http.Request) (Claim, error) {
	key, err := keyFrom(r.Header)
	if err != nil {
		return Claim{}, err
	}
	scope, err := m.cfg.Scope(r)
	switch {
	case errors.Is(err, errGlobal):
	case err != nil:
		m.cfg.Logger.ErrorContext(r.Context(), "idempotency: scope failed", slog.Any("error", err))
		return Claim{}, errScope
	case scope == "":
		m.cfg.Logger.ErrorContext(r.Context(), "idempotency: scope is empty")
		return Claim{}, errScope
	default:
		key = key.In(scope)
	}
	body, err := readBody(w, r, m.cfg.MaxRequestBytes)
	if err != nil {
		return Claim{}, err
	}
	return NewClaim(key, requestFingerprint(r, body, m.cfg.FingerprintParts(r))), nil
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

// trustedLength is how much of a declared length is taken for true before the
// bytes are there.
const trustedLength = 64 << 10

// readBody reads the whole body and puts it back for the handler.
func readBody(w http.ResponseWriter, r *http.Request, limit int64) ([]byte, error) {
	if r.Body == nil || r.Body == http.NoBody {
		return nil, nil
	}
	if r.ContentLength > limit {
		return nil, errBodyTooLarge
	}
	var buf bytes.Buffer
	buf.Grow(int(min(max(r.ContentLength, 0), trustedLength)) + bytes.MinRead)
	if _, err := buf.ReadFrom(http.MaxBytesReader(w, r.Body, limit)); err != nil {
		if _, tooLarge := errors.AsType[*http.MaxBytesError](err); tooLarge {
			return nil, errBodyTooLarge
		}
		return nil, errBodyUnreadable
	}
	r.Body = io.NopCloser(bytes.NewReader(buf.Bytes()))
	return buf.Bytes(), nil
}

// serve runs the handler under the claim and closes the claim before the
// client sees a byte.
func (m *middleware) serve(w http.ResponseWriter, r *http.Request, claim Claim, lease time.Duration, begun time.Time) {
	run, ctx := startRun(r.Context(), m.store, claim, lease, m.cfg.StoreTimeout, begun)
	defer run.end()
	rec := newRecorder(w, m.cfg.MaxResponseBytes, func(status int) { m.tombstone(run, status) })

	returned := false
	defer func() {
		if !returned { // the panic goes on to whoever recovers it
			m.close(run, nil)
		}
	}()
	m.next.ServeHTTP(rec, r.WithContext(ctx))
	returned = true

	if rec.spilled {
		m.close(run, nil)
		rec.finish()
		return
	}
	if s := run.settled.Load(); s != nil {
		m.close(run, nil)
		m.sendSettled(w, r, claim, rec, s)
		return
	}
	if resp := rec.response(m.cfg.KeepHeaders); m.cfg.Keep(resp.Status) {
		m.close(run, &resp)
	} else {
		m.close(run, nil)
	}
	rec.finish()
}

// tombstone records, before the first byte leaves, that the work was done and
// that its response cannot be kept.
func (m *middleware) tombstone(run *run, status int) {
	hijacked := status == 0
	if hijacked || m.cfg.Keep(status) {
		m.close(run, &Response{})
	}
}

// close tells the store how the run ended. A failure leaves the key taken until
// its lease runs out; the client gets its answer all the same.
func (m *middleware) close(run *run, resp *Response) {
	if run.closed {
		return
	}
	err := run.close(resp)
	if err != nil {
		m.cfg.Logger.ErrorContext(run.base, "idempotency: result could not be stored",
			slog.Any("key", run.claim.Key), slog.Any("error", err))
	}
	if s := run.settled.Load(); s == nil || !s.replayed { // answer counts a replay
		m.count.add(run.base, outcomeOfRun(s != nil, resp, err))
	}
}

// sendSettled answers from the record that the handler settled. A tombstone of
// this very run is for later requests; this one gets what the handler wrote.
func (m *middleware) sendSettled(w http.ResponseWriter, r *http.Request, claim Claim, rec *recorder, s *settlement) {
	switch {
	case s.replayed:
		m.answer(w, r, claim, s.record)
	case s.record.Response.Unavailable():
		rec.finish()
	default:
		rec.WriteHeader(http.StatusOK) // for a handler that wrote nothing
		maps.Copy(w.Header(), rec.sent)
		w.Header().Del("Content-Length")
		s.record.Response.Send(w)
	}
}

// answer serves a request whose work is done, or being done, by another run.
func (m *middleware) answer(w http.ResponseWriter, r *http.Request, claim Claim, out Outcome) {
	if err := out.refusal(claim.Fingerprint); err != nil {
		m.refuse(w, r, err)
		return
	}
	m.count.add(r.Context(), outcomeReplayed)
	m.cfg.OnReplay(r)
	w.Header().Set(ReplayedHeader, "true")
	out.Response.Send(w)
}
