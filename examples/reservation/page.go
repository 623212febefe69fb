package main

import (
	"crypto/subtle"
	"errors"
	"net/http"
	"strings"

	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/page"
)

// pagePath is where the operator's page is.
const pagePath = "/operator/"

// newPage is the operator's page. On real servers it is there only where a password is set; whoever knows
// that may do everything, under the name they give. A shop in memory is its visitor's own.
func newPage(cfg config, service operator.Config) *page.Page {
	if cfg.operatorPassword == "" && cfg.backend != backendMemory {
		return nil
	}
	return must(page.New(service, page.Config{Authorize: func(r *http.Request) (operator.Access, error) {
		name, password, given := r.BasicAuth()
		if cfg.operatorPassword == "" {
			return operator.Access{By: "visitor", Bodies: true, Change: true}, nil
		}
		if !given || name == "" || subtle.ConstantTimeCompare([]byte(password), []byte(cfg.operatorPassword)) != 1 {
			return operator.Access{}, errors.New("wrong password")
		}
		return operator.Access{By: name, Bodies: true, Change: true}, nil
	}}))
}

// withPage serves the page beside what next serves.
func (f *front) withPage(cfg config, next http.Handler) http.Handler {
	if f.page == nil {
		return next
	}
	shown := http.StripPrefix(strings.TrimSuffix(pagePath, "/"), f.page)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _, given := r.BasicAuth()
		switch {
		case !strings.HasPrefix(r.URL.Path+"/", pagePath):
			next.ServeHTTP(w, r)
		case cfg.operatorPassword != "" && !given:
			w.Header().Set("WWW-Authenticate", `Basic realm="operator", charset="UTF-8"`)
			http.Error(w, "say who you are", http.StatusUnauthorized)
		default:
			shown.ServeHTTP(w, r)
		}
	})
}
