package httpapi

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"sync"
	"time"
)

const readyTimeout = 2 * time.Second

// Check asks one part of the process whether it is ready.
type Check struct {
	Name  string
	Ready func(ctx context.Context) error
}

// Ops serves what operators ask: /healthz (the process is up), /readyz (its
// servers and services are ready) and /metrics; next gets all other requests,
// nil for none.
func Ops(checks []Check, metrics, next http.Handler, log *slog.Logger) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/healthz", methods{"GET": http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		jsonResponse(http.StatusOK, "application/json", []byte(`{"status":"ok"}`)).Send(w)
	})})
	mux.Handle("/readyz", methods{"GET": http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		serveReady(w, r, checks, log)
	})})
	mux.Handle("/metrics", methods{"GET": metrics})
	if log == nil {
		log = slog.Default()
	}
	if next == nil {
		next = http.HandlerFunc(notFound)
	}
	mux.Handle("/", next)
	return exactPaths(mux)
}

func serveReady(w http.ResponseWriter, r *http.Request, checks []Check, log *slog.Logger) {
	ctx, cancel := context.WithTimeout(r.Context(), readyTimeout)
	defer cancel()
	errs := askAll(ctx, checks)
	unready := []string{}
	for i, err := range errs {
		if err != nil {
			unready = append(unready, checks[i].Name)
		}
	}
	if len(unready) == 0 {
		jsonResponse(http.StatusOK, "application/json", []byte(`{"status":"ready"}`)).Send(w)
		return
	}
	// The answer names the part; what is wrong with it may name hosts, so it goes to the log only.
	log.WarnContext(ctx, "not ready", slog.Any("error", errors.Join(errs...)))
	body := encode(map[string]any{"status": "not ready", "waiting_for": unready})
	jsonResponse(http.StatusServiceUnavailable, "application/json", body).Send(w)
}

// askAll asks all at the same time: one that hangs says nothing about the others.
func askAll(ctx context.Context, checks []Check) []error {
	errs := make([]error, len(checks))
	var asking sync.WaitGroup
	for i, check := range checks {
		asking.Go(func() { errs[i] = check.Ready(ctx) })
	}
	asking.Wait()
	return errs
}
