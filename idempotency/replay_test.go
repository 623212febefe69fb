package idempotency_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
)

// A replay says on the wire what the first answer said, with its length.
func TestReplayOverTheWire(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		method, body string
		status       int
	}{
		"a body":          {http.MethodPost, `{"id":1}`, 201},
		"no body":         {http.MethodPost, "", 200},
		"a long body":     {http.MethodPut, strings.Repeat("long ", 100_000), 200},
		"a redirection":   {http.MethodPost, "see other", 303},
		"a refusal":       {http.MethodPatch, "<p>no</p>", 404},
		"204":             {http.MethodPost, "", 204},
		"304 with a body": {http.MethodPost, "nothing of this is sent", 304},
		"HEAD":            {http.MethodHead, "its length", 200},
		"odd status":      {http.MethodPost, "?", 498},
	} {
		server := httptest.NewServer(protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{
			Methods: []string{http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodHead},
		}, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Location", "/1")
			w.WriteHeader(http.StatusEarlyHints)
			w.WriteHeader(tt.status)
			w.WriteHeader(http.StatusInternalServerError) // the first one counts
			_, _ = io.WriteString(w, tt.body)
		}))
		client := server.Client()
		client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
		first := exchange(t, client, tt.method, server.URL)
		for range 2 { // on the same connection
			again := exchange(t, client, tt.method, server.URL)
			if again.status != first.status || again.status != tt.status || again.body != first.body ||
				again.Get("Content-Type") != first.Get("Content-Type") || again.Get("Location") != "/1" || again.Get(idempotency.ReplayedHeader) != "true" {
				t.Errorf("%s: %d %v %.100q, then %d %v %.100q", name, first.status, first.Header, first.body, again.status, again.Header, again.body)
			}
			want := strconv.Itoa(len(tt.body))
			if tt.status == 204 || tt.status == 304 {
				want = ""
			}
			if got := again.Get("Content-Length"); got != want {
				t.Errorf("%s: Content-Length %q, want %q", name, got, want)
			}
		}
		server.Close()
	}
}

type heard struct {
	http.Header
	status int
	body   string
}

func exchange(t *testing.T, client *http.Client, method, url string) heard {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, url, nil)
	must(t, err)
	r.Header.Set(idempotency.Header, goodKey)
	res, err := client.Do(r)
	must(t, err)
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	must(t, err)
	return heard{res.Header, res.StatusCode, string(body)}
}

// An answer that the handler itself has found counts as a replay also where a response may be no longer as
// long as it.
func TestReplayLongerThanTheLimit(t *testing.T) {
	t.Parallel()
	long, replays := strings.Repeat("long ", 100), 0
	cfg := idempotency.MiddlewareConfig{MaxResponseBytes: 100, OnReplay: func(*http.Request) { replays++ }}
	h := protect(t, idempotencytest.NewStore(), cfg, func(w http.ResponseWriter, r *http.Request) {
		claim, _ := driver.ClaimFrom(r.Context())
		claim.Settle(driver.BeginResult{
			State: driver.Completed, Fingerprint: claim.Fingerprint, Response: driver.Response{Status: 201, Body: []byte(long)},
		}, true)
		w.WriteHeader(http.StatusOK)
		_, _ = io.WriteString(w, long)
	})
	rec := send(h, post(goodKey, nil))
	if rec.Code != 201 || rec.Body.String() != long || rec.Header().Get(idempotency.ReplayedHeader) != "true" || replays != 1 {
		t.Errorf("%d %.100s %v, %d replays", rec.Code, rec.Body, rec.Header(), replays)
	}
}
