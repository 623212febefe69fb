package httpapi

import (
	"net/http"
	"path"
	"slices"
	"strings"

	"github.com/google/uuid"
)

// methods are the handlers of one path.
type methods map[string]http.Handler

// ServeHTTP picks the handler of the method; HEAD is served as GET.
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

// validID tells whether a path segment can be an id: a lowercase UUID in its usual form. "" is a path without id.
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
