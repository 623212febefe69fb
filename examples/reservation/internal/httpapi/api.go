package httpapi

import (
	"context"
	"log/slog"
	"net/http"
	"time"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/ratelimit"
)

// Backend is where the shop is kept.
type Backend interface {
	booking.Reader
	// Once runs fn in one transaction and stores its response in it. A request whose key has a response
	// already gets that one, and fn has no effect. fn may run several times; an error of it rolls back.
	// Transactions of one event wait for each other; eventID is "" where there is none.
	Once(ctx context.Context, eventID string,
		fn func(ctx context.Context, w booking.Work) (idempotency.Response, error)) (idempotency.Response, error)
}

// Config says what the API stands on. Shop and Backend are required.
type Config struct {
	Shop    booking.Shop
	Backend Backend
	// Keys is the store that every POST passes with its idempotency key. nil: none is asked for.
	Keys driver.Store
	// Limiter counts POSTs: UserLimit per minute and user, at least 1; GlobalLimit per minute for all, 0 for none.
	// nil: nobody is limited.
	Limiter                ratelimit.Limiter
	UserLimit, GlobalLimit int
	Logger                 *slog.Logger // nil means slog.Default()
	// Trace stands around the routes, so that it learns which one a request took. Optional.
	Trace func(http.Handler) http.Handler
}

type api struct {
	shop    booking.Shop
	backend Backend
	log     *seldom
}

// New returns the handler of everything below /api/, and of a list of that at /.
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

// requestTimeout ends requests whose server hangs. A transaction that waits for locks in all its
// attempts, 6 times 8 s and the pauses between, is over before: that is answered by LOCK_TIMEOUT.
const requestTimeout = time.Minute

func timeLimited(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), requestTimeout)
		defer cancel()
		next.ServeHTTP(w, r.WithContext(ctx))
	})
}
