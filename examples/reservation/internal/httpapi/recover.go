package httpapi

import (
	"log/slog"
	"net/http"
	"runtime/debug"
)

const codeInternal = "INTERNAL"

// recovered answers a panic of a handler like any other error. It stands around
// the guard, which holds an answer back until the handler has returned, and
// releases the key when it panics.
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
