package idempotency_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"reflect"
	"runtime"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
)

// same reports whether two requests with one key count as the same request.
func same(t *testing.T, cfg idempotency.MiddlewareConfig, a, b *http.Request) bool {
	t.Helper()
	h := protect(t, idempotencytest.NewStore(), cfg, func(http.ResponseWriter, *http.Request) {})
	key := string(idempotency.NewKey())
	for _, r := range []*http.Request{a, b} {
		r.Header.Set(idempotency.Header, key)
	}
	send(h, a)
	switch rec := send(h, b); rec.Code {
	case 200:
		return true
	case 422:
		return false
	default:
		t.Fatalf("answer %d %s", rec.Code, rec.Body)
		return false
	}
}

func jsonPost(body string) *http.Request {
	r := httptest.NewRequest(http.MethodPost, "/things", strings.NewReader(body))
	r.Header.Set("Content-Type", "application/json; charset=utf-8")
	return r
}

func TestCanonicalJSON(t *testing.T) {
	t.Parallel()
	canonical := idempotency.MiddlewareConfig{CanonicalJSON: true}
	for _, tt := range []struct {
		a, b string
		want bool
	}{
		{`{"a":1,"b":[true,null,"x"]}`, " {\"b\" : [ true, null,\"\\u0078\"],\n\"a\":1 }", true},
		{`{"a":{"c":1,"d":2},"b":1}`, `{"b":1,"a":{"d":2,"c":1}}`, true},
		{`"\u00fc"`, `"ü"`, true},
		{`{}`, `{}`, true},
		{`{}`, `[]`, false},
		{`{"a":1}`, `{"a":2}`, false},
		{`{"a":1}`, `{"b":1}`, false},
		{`[1,2]`, `[2,1]`, false},
		{`[[1],2]`, `[1,[2]]`, false},
		{`1`, `1.0`, false}, // some readers treat them as different amounts
		{`1`, `"1"`, false},
		{`true`, `"true"`, false},
		{`12345678901234567890`, `12345678901234567891`, false},
		{`{"a":{"b":1}}`, `{"a":{},"b":1}`, false},
		// No canonical form: compared byte by byte.
		{`{"a":1,"a":2}`, `{"a":2}`, false},
		{`{"a":1,"a":2}`, `{"a":2,"a":1}`, false},
		{`{"a":1,"a":2}`, `{"a":1,"a":2}`, true},
		{`"\ud800"`, `"\ud801"`, false},
		{`"\ud800x"`, `"\ud801x"`, false},
		{`"\ud800\n"`, `"\ud801\n"`, false},
		{`["\ud83d\ude00"]`, `["😀"]`, true},
		{`["\"\\\/\b\f\n\r\t"]`, `["\u0022\u005c/\u0008\u000c\u000A\u000d\u0009"]`, true},
		{`["\ufffd"]`, `["\uFFFD"]`, true},
		{`{"\u0061":1,"a":2}`, `{"a":1,"\u0061":2}`, false},
		{`[1,[2,3]]`, `[1,2,[3]]`, false},
		{`["a","b"]`, `["a\u0022,\u0022b"]`, false},
		{"\"\xff\"", "\"\xfe\"", false},
		{`{"a":1`, `{"a":1 `, false},
		{`{} {}`, `{}`, false},
		{``, ` `, false},
		{strings.Repeat("[", 5000) + strings.Repeat("]", 5000), strings.Repeat("[ ", 5000) + strings.Repeat("]", 5000), false},
	} {
		if got := same(t, canonical, jsonPost(tt.a), jsonPost(tt.b)); got != tt.want {
			t.Errorf("%.60q and %.60q: the same is %v, want %v", tt.a, tt.b, got, tt.want)
		}
		if got := same(t, idempotency.MiddlewareConfig{}, jsonPost(tt.a), jsonPost(tt.b)); got != (tt.a == tt.b) {
			t.Errorf("raw: %.60q and %.60q: the same is %v", tt.a, tt.b, got)
		}
	}
	text := func(body string) *http.Request {
		r := jsonPost(body)
		r.Header.Set("Content-Type", "text/plain")
		return r
	}
	if same(t, canonical, text(`{"a":1}`), text(`{"a": 1}`)) {
		t.Error("white space does not count in plain text")
	}
	problem := func(body string) *http.Request {
		r := jsonPost(body)
		r.Header.Set("Content-Type", "application/merge-patch+json")
		return r
	}
	if !same(t, canonical, problem(`{"a":1}`), problem(`{"a": 1}`)) {
		t.Error("white space counts in +json")
	}
}

// A form is the same request with another boundary: browsers choose a new one for each upload. A boundary that makes
// a reader split the body differently counts as a difference.
func TestFingerprint_multipartBoundary(t *testing.T) {
	t.Parallel()
	type form struct{ boundary, body string }
	post := func(f form) *http.Request {
		r := jsonPost(strings.ReplaceAll(f.body, "B", f.boundary))
		r.Header.Set("Content-Type", `multipart/form-data; boundary="`+f.boundary+`"`)
		return r
	}
	const usual = "--B\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\none\r\n--B\r\n\r\ntwo\r\n--B--\r\n"
	for _, tt := range []struct {
		name string
		a, b form
		want bool
	}{
		{"another boundary", form{"x1", usual}, form{"y--22", usual}, true},
		{"another value", form{"x1", usual}, form{"y2", strings.Replace(usual, "two", "three", 1)}, false},
		{"another number of parts", form{"x1", usual}, form{"y2", strings.Replace(usual, "\r\n--B\r\n\r\ntwo", "two", 1)}, false},
		{"a line that only begins as the boundary", form{"x", "--B\r\n\r\n\r\n--Bz\r\n--B--"}, form{"y", "--B\r\n\r\n\r\n--Bz\r\n--B--"}, false},
		{"no boundary in the body", form{"x", "one"}, form{"y", "two"}, false},
		{"the same without a boundary", form{"x", "one"}, form{"y", "one"}, true},
		{"another text before the first part", form{"x", "one\r\n--B--"}, form{"y", "two\r\n--B--"}, false},
	} {
		for _, cfg := range []idempotency.MiddlewareConfig{{}, {CanonicalJSON: true}} {
			if got := same(t, cfg, post(tt.a), post(tt.b)); got != tt.want {
				t.Errorf("%s, %+v: the same is %v, want %v", tt.name, cfg.CanonicalJSON, got, tt.want)
			}
		}
	}
}

// No document makes the middleware allocate a large multiple of its size.
func TestCanonicalJSONIsBounded(t *testing.T) {
	const size = 1 << 20
	var names strings.Builder
	for i := 0; names.Len() < size; i++ {
		fmt.Fprintf(&names, `"%x":1,`, i)
	}
	for name, body := range map[string]string{
		"numbers":       "[" + strings.Repeat("1,", size/2) + "1]",
		"small objects": "[" + strings.Repeat(`{"":1},`, size/7) + "1]",
		"escapes":       "[" + strings.Repeat(`"\u0061",`, size/9) + "1]",
		"members":       "{" + names.String() + `"":1}`,
		"deep":          strings.Repeat(`{"a":[`, 400) + strings.Repeat("1,", size/2) + "1" + strings.Repeat("]}", 400),
	} {
		const most = 48 // slices that grow are copied
		h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{CanonicalJSON: true, MaxRequestBytes: 2 * size}, func(http.ResponseWriter, *http.Request) {})
		r := jsonPost(body)
		r.Header.Set(idempotency.Header, goodKey)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		if rec := send(h, r); rec.Code != 200 {
			t.Errorf("%s: %d %s", name, rec.Code, rec.Body)
		}
		runtime.ReadMemStats(&after)
		if times := int(after.TotalAlloc-before.TotalAlloc) / len(body); times > most {
			t.Errorf("%s: a body of %d bytes allocates %d times as much", name, len(body), times)
		}
	}
}

// Changing CanonicalJSON must not reject keys that are in use.
func TestSwitchingCanonicalJSON(t *testing.T) {
	t.Parallel()
	store := idempotencytest.NewStore()
	for _, canonical := range []bool{false, true, false} {
		h := protect(t, store, idempotency.MiddlewareConfig{CanonicalJSON: canonical}, func(http.ResponseWriter, *http.Request) {})
		r := jsonPost(`{"a":1}`)
		r.Header.Set(idempotency.Header, goodKey)
		if rec := send(h, r); rec.Code != 200 {
			t.Errorf("canonical %v: %d", canonical, rec.Code)
		}
	}
}

// FuzzCanonicalJSON checks that documents count as the same request only if every reader parses them as the same
// document.
func FuzzCanonicalJSON(f *testing.F) {
	f.Add(`{"a":1,"b":[true]}`, `{"b":[true],"a":1}`)
	f.Add(`{"a":1,"a":2}`, `{"a":2}`)
	f.Add(`"\ud800"`, `"\ufffd"`)
	f.Add(`{"":0}`, `{"" :0}`)
	f.Fuzz(func(t *testing.T, a, b string) {
		if !same(t, idempotency.MiddlewareConfig{CanonicalJSON: true}, jsonPost(a), jsonPost(b)) || a == b {
			return
		}
		if got, want := parse(t, a), parse(t, b); !reflect.DeepEqual(got, want) {
			t.Errorf("%q and %q are taken for the same request", a, b)
		}
	})
}

func parse(t *testing.T, body string) (v any) {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(body))
	d.UseNumber()
	if err := d.Decode(&v); err != nil {
		t.Errorf("%q has a canonical form: %v", body, err)
	}
	return v
}

// The fingerprint distinguishes routes even if a router has stripped the path.
func TestFingerprintCoversTheWholePath(t *testing.T) {
	t.Parallel()
	inner := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{}, func(http.ResponseWriter, *http.Request) {})
	mux := http.NewServeMux()
	mux.Handle("/a/", http.StripPrefix("/a", inner))
	mux.Handle("/b/", http.StripPrefix("/b", inner))
	for _, tt := range []struct {
		target string
		status int
	}{{"/a/things?x=1", 200}, {"http://example.com/a/things?x=1", 200}, {"/b/things?x=1", 422}, {"/a/things", 422}} {
		r := httptest.NewRequest(http.MethodPost, tt.target, nil)
		r.Header.Set(idempotency.Header, goodKey)
		if rec := send(mux, r); rec.Code != tt.status {
			t.Errorf("%s: %d, want %d", tt.target, rec.Code, tt.status)
		}
	}
	byHand := post(goodKey, nil)
	byHand.RequestURI, byHand.URL.Path = "", "/a/things"
	byHand.URL.RawQuery = "x=1"
	if rec := send(inner, byHand); rec.Code != 200 {
		t.Errorf("without a request line: %d", rec.Code)
	}
}

// A path may contain another URL; the part before it is compared too.
func TestFingerprintOfAPathWithAnAddress(t *testing.T) {
	t.Parallel()
	request := func(target string) *http.Request { return httptest.NewRequest(http.MethodPost, target, nil) }
	for _, tt := range []struct {
		a, b string
		want bool
	}{
		{"/charge/https://a.example/1", "/refund/https://b.example/1", false},
		{"/charge/https://a.example/1", "/charge/https://a.example/1", true},
		{"http://a.example/1", "/1", true},
	} {
		if got := same(t, idempotency.MiddlewareConfig{}, request(tt.a), request(tt.b)); got != tt.want {
			t.Errorf("%s and %s: the same request %v, want %v", tt.a, tt.b, got, tt.want)
		}
	}
}
