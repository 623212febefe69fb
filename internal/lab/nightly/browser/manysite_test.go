package browser_test

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/holdfast-go/holdfast/examples/operator"
)

// site is an operator's page in this process, and its address.
func site(t *testing.T, cfg operator.Config) (url string) {
	t.Helper()
	cfg.Log = &operator.MemoryLog{}
	o, err := operator.New(cfg)
	check(t, err)
	page, err := o.Handler(operator.PageConfig{Authorize: func(*http.Request) (operator.Access, error) {
		return operator.Access{By: "ada", Bodies: true, Change: true}, nil
	}})
	check(t, err)
	server := httptest.NewServer(page)
	t.Cleanup(server.Close)
	t.Cleanup(page.Close)
	return server.URL + "/"
}
