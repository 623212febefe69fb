// Package httpapi serves the shop over HTTP: JSON in and out, every error as
// application/problem+json with a member code.
//
// Each request is checked in one order: route, method, user, rate limit,
// idempotency key, body. A request that fails one check does not reach the
// later ones, so an unknown path costs no unit of the limit, and a bad body
// does not use up the key.
//
// A POST runs its use case through Once: the answer is stored in the transaction
// of the change itself, and a repeated request gets that answer, not a second
// change. Rejections such as SEATS_UNAVAILABLE are answers too and are stored the
// same way. A request that the client can fix and send again (400, 404, 413, 415, 429)
// and the shop's own faults (503) release the key instead.
package httpapi

import (
	"context"
	"log/slog"
	"net/http"
	"path"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/ratelimit"
)

// Backend stores the shop.
type Backend interface {
	booking.Reader
	// Once runs fn in one transaction and stores its response in it. If the request's key already has a response,
	// Once returns that one, and fn has no effect. fn may run several times; an error of fn rolls back.
	// Transactions of one event wait for each other; eventID is "" if there is none.
	Once(ctx context.Context, eventID string,
		fn func(ctx context.Context, w booking.Work) (idempotency.Response, error)) (idempotency.Response, error)
}

// Config configures the API. Shop and Backend are required.
type Config struct {
	Shop    booking.Shop
	Backend Backend
	// Keys is the store of idempotency keys for every POST. nil: no key is required.
	Keys driver.Store
	// Limiter counts POSTs: UserLimit per minute and user, at least 1; GlobalLimit per minute for all, 0 for none.
	// nil: no limits.
	Limiter                ratelimit.Limiter
	UserLimit, GlobalLimit int
	Logger                 *slog.Logger // nil means slog.Default()
	// Trace wraps the routes, so that it sees the route of a request. Optional.
	Trace func(http.Handler) http.Handler
}

type api struct {
	shop    booking.Shop
	backend Backend
	log     *seldom
}

// New returns the handler of everything below /api/, and of an index at /.
func New(cfg Config) (http.Handler, error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	log := newSeldom(cfg.Logger)
	guard, err := newGuard(cfg, log)
	if err != nil {
		return nil, err
	}
	a := &api{cfg.Shop, cfg.Backend, log}
	get := func(h http.HandlerFunc) http.Handler { return h }
	post := func(h http.HandlerFunc) http.Handler { return guard(h) }

	mux := http.NewServeMux()
	mux.Handle("/api/events", methods{"GET": get(a.listEvents), "POST": post(a.createEvent)})
	mux.Handle("/api/events/{id}", methods{"GET": get(a.showEvent)})
	mux.Handle("/api/events/{id}/stats", methods{"GET": get(a.showStats)})
	mux.Handle("/api/reservations", methods{"POST": post(a.hold)})
	mux.Handle("/api/reservations/{id}", methods{"GET": get(a.showReservation)})
	mux.Handle("/api/reservations/{id}/confirm", methods{"POST": post(a.confirm)})
	mux.Handle("/api/reservations/{id}/cancel", methods{"POST": post(a.cancel)})
	mux.Handle("/{$}", methods{"GET": http.HandlerFunc(showIndex)})
	mux.HandleFunc("/", notFound)
	var routes http.Handler = mux
	if cfg.Trace != nil {
		routes = cfg.Trace(mux)
	}
	return recovered(log, exactPaths(timeLimited(routes))), nil
}

// requestTimeout ends requests whose server hangs. It is longer than a transaction that waits for locks in all its
// attempts, 6 times 8 s and the pauses between. Such a transaction is answered by LOCK_TIMEOUT.
const requestTimeout = time.Minute

func timeLimited(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), requestTimeout)
		defer cancel()
		next.ServeHTTP(w, r.WithContext(ctx))
	})
}

// methods are the handlers of one path.
type methods map[string]http.Handler

// ServeHTTP calls the handler of the method. HEAD is served as GET.
func (m methods) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !validID(r.PathValue("id")) {
		notFound(w, r)
		return
	}
	method := r.Method
	if method == http.MethodHead {
		method = http.MethodGet
	}
	h, ok := m[method]
	if !ok {
		w.Header().Set("Allow", m.allow())
		newProblem(http.StatusMethodNotAllowed, codeMethodNotAllowed, "").write(w)
		return
	}
	h.ServeHTTP(w, r)
}

func (m methods) allow() string {
	var names []string
	for name := range m {
		names = append(names, name)
		if name == http.MethodGet {
			names = append(names, http.MethodHead)
		}
	}
	slices.Sort(names)
	return strings.Join(names, ", ")
}

// validID reports whether a path segment can be an id: a lowercase UUID in its usual form. "" is a path without id.
func validID(id string) bool {
	if id == "" {
		return true
	}
	u, err := uuid.Parse(id)
	return err == nil && u.String() == id
}

// exactPaths answers 404 where http.ServeMux would redirect to a tidier path.
func exactPaths(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != path.Clean("/"+r.URL.Path) {
			notFound(w, r)
			return
		}
		next.ServeHTTP(w, r)
	})
}

func notFound(w http.ResponseWriter, _ *http.Request) {
	newProblem(http.StatusNotFound, "NOT_FOUND", "").write(w)
}

// Ops serves the endpoints for operators: /healthz (the process is up), /readyz (by ready) and /metrics. next serves
// all other requests; nil: 404.
func Ops(ready, metrics, next http.Handler) http.Handler {
	if next == nil {
		next = http.HandlerFunc(notFound)
	}
	mux := http.NewServeMux()
	mux.Handle("/healthz", methods{"GET": http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		jsonResponse(http.StatusOK, "application/json", []byte(`{"status":"ok"}`)).Send(w)
	})})
	mux.Handle("/readyz", methods{"GET": ready})
	mux.Handle("/metrics", methods{"GET": metrics})
	mux.Handle("/", next)
	return exactPaths(mux)
}

// index is the answer of / to all clients except browsers.
const index = `A ticket shop. It answers:

  GET  /api/events
  POST /api/events                      {"name":"Concert","seats":50}
  GET  /api/events/{id}
  GET  /api/events/{id}/stats
  POST /api/reservations                {"event_id":"...","quantity":2}
  GET  /api/reservations/{id}
  POST /api/reservations/{id}/confirm
  POST /api/reservations/{id}/cancel

A POST needs the headers X-Mock-User-Id, Idempotency-Key and Content-Type: application/json.
Also on this address, or on -ops-addr: /healthz, /readyz, /metrics. A browser may find a page here.
The shop prints commands to try at its start; its README explains them.
`

func showIndex(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_, _ = w.Write([]byte(index)) // the reader may have left
}

const codeInternal = "INTERNAL"

// recovered answers a panic of a handler like any other error. It wraps the
// guard, which holds an answer back until the handler has returned, and
// releases the key if it panics.
func recovered(log *seldom, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() {
			p := recover()
			if p == nil {
				return
			}
			if p == http.ErrAbortHandler {
				panic(p)
			}
			log.write(r.Context(), slog.LevelError, "handler panicked", "panic",
				slog.String("path", r.URL.Path), slog.Any("panic", p), slog.String("stack", string(debug.Stack())))
			newProblem(http.StatusInternalServerError, codeInternal, "").write(w)
		}()
		next.ServeHTTP(w, r)
	})
}
