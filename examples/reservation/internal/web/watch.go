package web

import (
	"fmt"
	"net/http"
	"strings"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
)

// watched counts the answers to POSTs.
func (p *Page) watched(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPost || !strings.HasPrefix(r.URL.Path, "/api/") {
			next.ServeHTTP(w, r)
			return
		}
		answer := &answer{ResponseWriter: w, status: http.StatusOK}
		next.ServeHTTP(answer, r)
		replayed := ""
		if w.Header().Get("Idempotency-Replayed") == "true" {
			replayed = ", replayed"
		}
		p.cfg.Flow.Note(flow.Request, fmt.Sprintf("POST %s: %d%s", short(r.URL.Path), answer.status, replayed))
	})
}

// maxPath is how much of a path is shown.
const maxPath = 80

func short(path string) string {
	if len(path) <= maxPath {
		return path
	}
	return path[:maxPath] + "…"
}

// answer remembers the status.
type answer struct {
	http.ResponseWriter
	status int
}

// WriteHeader implements http.ResponseWriter.
func (a *answer) WriteHeader(status int) {
	a.status = status
	a.ResponseWriter.WriteHeader(status)
}

// Unwrap is for http.ResponseController.
func (a *answer) Unwrap() http.ResponseWriter { return a.ResponseWriter }
