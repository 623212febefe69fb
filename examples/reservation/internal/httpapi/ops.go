package httpapi

import (
	"context"
	"log/slog"
	"net/http"
)

// Ops serves what operators ask: /healthz (the process is up), /readyz (every
// check is well) and /metrics; next gets all other requests, nil for none.
func Ops(checks []Check, metrics, next http.Handler, log *slog.Logger) http.Handler {
	if log == nil {
		log = slog.Default()
	}
	if next == nil {
		next = http.HandlerFunc(notFound)
	}
	ready := newReadiness(checks, log)
	mux := http.NewServeMux()
	mux.Handle("/healthz", methods{"GET": http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		jsonResponse(http.StatusOK, "application/json", []byte(`{"status":"ok"}`)).Send(w)
	})})
	mux.Handle("/readyz", methods{"GET": http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		serveReady(w, ready.waitingFor(context.WithoutCancel(r.Context())))
	})})
	mux.Handle("/metrics", methods{"GET": metrics})
	mux.Handle("/", next)
	return exactPaths(mux)
}

func serveReady(w http.ResponseWriter, waitingFor []string) {
	if len(waitingFor) == 0 {
		jsonResponse(http.StatusOK, "application/json", []byte(`{"status":"ready"}`)).Send(w)
		return
	}
	// The answer names the part; what is wrong with it may name hosts, so it goes to the log only.
	body := encode(map[string]any{"status": "not ready", "waiting_for": waitingFor})
	jsonResponse(http.StatusServiceUnavailable, "application/json", body).Send(w)
}
