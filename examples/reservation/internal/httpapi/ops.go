package httpapi

import "net/http"

// Ops serves what operators ask: /healthz (the process is up), /readyz (ready answers) and /metrics; next gets all
// other requests, nil for none.
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
