package main

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// The operator's page in memory is its visitor's own; on servers it wants the password, and is not there
// where none is set.
func TestOperatorPage(t *testing.T) {
	t.Parallel()
	next := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "next", http.StatusTeapot) })
	for name, tc := range map[string]struct {
		cfg            config
		path, password string
		code           int
		part           string
	}{
		"memory":         {config{backend: backendMemory}, "/operator/", "", 200, "visitor"},
		"a view":         {config{backend: backendMemory}, "/operator/groups", "", 200, "visitor"},
		"no slash":       {config{backend: backendMemory}, "/operator", "", 307, ""},
		"beside it":      {config{backend: backendMemory}, "/operators", "", 418, "next"},
		"elsewhere":      {config{backend: backendMemory}, "//api", "", 418, "next"},
		"no password":    {config{backend: backendServices}, "/operator/", "x", 418, "next"},
		"who":            {config{backend: backendServices, operatorPassword: "x"}, "/operator/", "", 401, "say who"},
		"wrong password": {config{backend: backendServices, operatorPassword: "x"}, "/operator/", "y", 403, "may not"},
		"right password": {config{backend: backendServices, operatorPassword: "x"}, "/operator/", "x", 200, "ada"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			parts := tc.cfg
			parts.backend, parts.userLimit, parts.globalLimit = backendMemory, 10, 1000
			b, err := open(t.Context(), parts)
			noError(t, err)
			f := &front{page: newPage(tc.cfg, b.operator)}
			r := httptest.NewRequest(http.MethodGet, "http://shop"+tc.path, nil)
			if tc.password != "" {
				r.SetBasicAuth("ada", tc.password)
			}
			w := httptest.NewRecorder()
			f.withPage(tc.cfg, next).ServeHTTP(w, r)
			if w.Code != tc.code || !strings.Contains(w.Body.String(), tc.part) {
				t.Errorf("%d: %s", w.Code, w.Body)
			}
		})
	}
}
