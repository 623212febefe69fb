package idempotency_test

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
)

// guarded is a server whose handler answers with the length of the body, and
// that counts what reaches its store.
type guarded struct {
	t     *testing.T
	conns pipes
	begun atomic.Int64
	ran   atomic.Int64
}

// guard serves connections in memory. A client that stops in the middle has 5 s.
func guard(t *testing.T) *guarded {
	t.Helper()
	g := &guarded{t: t, conns: make(pipes)}
	store := &faulty{Store: idempotencytest.NewStore(), begin: func() error { g.begun.Add(1); return nil }}
	h := protect(t, store, idempotency.MiddlewareConfig{MaxRequestBytes: 64 << 10, CanonicalJSON: true},
		func(w http.ResponseWriter, r *http.Request) {
			g.ran.Add(1)
			n, err := io.Copy(io.Discard, r.Body)
			if err != nil {
				t.Errorf("handler: %v", err)
			}
			fmt.Fprint(w, n)
		})
	server := &http.Server{Handler: h, ReadTimeout: 5 * time.Second}
	ended := make(chan struct{})
	go func() { defer close(ended); _ = server.Serve(g.conns) }()
	t.Cleanup(func() {
		close(g.conns)
		<-ended
		_ = server.Close()
		time.Sleep(time.Second) // of the bubble: a connection ends a little after its answer
	})
	return g
}

// pipes is a listener whose connections the test makes.
type pipes chan net.Conn

func (p pipes) Accept() (net.Conn, error) {
	if conn, ok := <-p; ok {
		return conn, nil
	}
	return nil, net.ErrClosed
}

func (pipes) Close() error   { return nil }
func (pipes) Addr() net.Addr { return &net.TCPAddr{} }

// say sends text as it is and returns the status line and the rest of the answer.
func (g *guarded) say(text io.Reader) string {
	g.t.Helper()
	conn, theirs := net.Pipe()
	defer conn.Close()
	g.conns <- theirs
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		_, _ = io.Copy(conn, text) // the server may not want all of it
	}()
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		g.t.Errorf("no answer: %v", err)
		return ""
	}
	body, _ := io.ReadAll(io.LimitReader(res.Body, 1<<16))
	_ = conn.Close()
	<-sent
	return res.Status + " " + string(body)
}

const head = "POST /things HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"

// Every malformed request gets its code, and nothing of it reaches the store.
func TestBadInputOverTheWire(t *testing.T) {
	t.Parallel()
	key := "Idempotency-Key: " + goodKey + "\r\n"
	for name, tt := range map[string]struct {
		text io.Reader
		want string // in the answer
	}{
		"no key":             {strings.NewReader(head + "Content-Length: 0\r\n\r\n"), "400 Bad Request " + `{"code":"IDEMPOTENCY_KEY_REQUIRED"`},
		"empty key":          {strings.NewReader(head + "Idempotency-Key:\r\nContent-Length: 0\r\n\r\n"), "IDEMPOTENCY_KEY_INVALID"},
		"two keys":           {strings.NewReader(head + key + key + "Content-Length: 0\r\n\r\n"), "IDEMPOTENCY_KEY_INVALID"},
		"two spellings":      {strings.NewReader(head + key + "idempotency-key: " + goodKey + "\r\nContent-Length: 0\r\n\r\n"), "IDEMPOTENCY_KEY_INVALID"},
		"control byte":       {strings.NewReader(head + "Idempotency-Key: \x01" + goodKey[1:] + "\r\nContent-Length: 0\r\n\r\n"), "400 Bad Request"},
		"half quoted":        {strings.NewReader(head + "Idempotency-Key: \"" + goodKey + "\r\nContent-Length: 0\r\n\r\n"), "IDEMPOTENCY_KEY_INVALID"},
		"key of 64 KiB":      {strings.NewReader(head + "Idempotency-Key: " + strings.Repeat("a", 64<<10) + "\r\nContent-Length: 0\r\n\r\n"), "IDEMPOTENCY_KEY_INVALID"},
		"header of 4 MiB":    {strings.NewReader(head + key + "X: " + strings.Repeat("a", 4<<20) + "\r\n\r\n"), "431 "},
		"100,000 headers":    {strings.NewReader(head + key + strings.Repeat("X: aaaaaaaaaaaaaaaa\r\n", 100_000) + "\r\n"), "431 "},
		"declared 100 MB":    {strings.NewReader(head + key + "Content-Length: 100000000\r\n\r\nx"), "413 Request Entity Too Large " + `{"code":"REQUEST_TOO_LARGE"`},
		"sent 100 MB":        {io.MultiReader(strings.NewReader(head+key+"Content-Length: 100000000\r\n\r\n"), io.LimitReader(endless{}, 100_000_000)), "413 "},
		"endless chunks":     {io.MultiReader(strings.NewReader(head+key+"Transfer-Encoding: chunked\r\n\r\n"), chunks{}), "413 "},
		"chunks that stop":   {io.MultiReader(strings.NewReader(head+key+"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n"), stuck{}), `400 Bad Request {"code":"INVALID_REQUEST"`},
		"malformed chunk":    {strings.NewReader(head + key + "Transfer-Encoding: chunked\r\n\r\nZ\r\n"), `400 Bad Request {"code":"INVALID_REQUEST"`},
		"shorter than said":  {io.MultiReader(strings.NewReader(head+key+"Content-Length: 10\r\n\r\nabc"), stuck{}), `400 Bad Request {"code":"INVALID_REQUEST"`},
		"declared 2^63 more": {strings.NewReader(head + key + "Content-Length: 9223372036854775808\r\n\r\n"), "400 Bad Request"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				g := guard(t)
				if got := g.say(tt.text); !strings.Contains(got, tt.want) {
					t.Errorf("answer %.300q; want %q", got, tt.want)
				}
				if g.begun.Load() != 0 || g.ran.Load() != 0 {
					t.Errorf("the store was asked %d times, the handler ran %d times", g.begun.Load(), g.ran.Load())
				}
			})
		})
	}
}

// chunks never end.
type chunks struct{}

func (chunks) Read(p []byte) (int, error) {
	const chunk = "400\r\n"
	if len(p) < 2048 {
		return copy(p, "1\r\nx\r\n"), nil
	}
	n := copy(p, chunk) + 1024
	return n + copy(p[n:], "\r\n"), nil
}

// stuck sends nothing for longer than the server waits.
type stuck struct{}

func (stuck) Read([]byte) (int, error) {
	time.Sleep(time.Minute) // timing: in a bubble
	return 0, io.EOF
}

// What is odd but allowed reaches the handler as it is.
func TestOddBodies(t *testing.T) {
	t.Parallel()
	var bomb bytes.Buffer
	z := gzip.NewWriter(&bomb)
	_, _ = io.CopyN(z, endless{}, 10<<20)
	_ = z.Close()
	for name, tt := range map[string]struct{ head, body string }{
		"no body":       {"", ""},
		"invalid UTF-8": {"", "\xff\xfe{"},
		"gzip bomb":     {"Content-Encoding: gzip\r\n", bomb.String()},
		"deep JSON":     {"", strings.Repeat("[", 60<<10)},
		"many members":  {"", `{"a":` + strings.Repeat(`{"a":`, 9000)},
		"at the limit":  {"", strings.Repeat("x", 64<<10)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				g := guard(t)
				text := fmt.Sprintf("%sIdempotency-Key: %s\r\n%sContent-Length: %d\r\n\r\n%s", head, goodKey, tt.head, len(tt.body), tt.body)
				for range 2 {
					if got, want := g.say(strings.NewReader(text)), fmt.Sprintf("200 OK %d", len(tt.body)); got != want {
						t.Errorf("answer %.200q; want %q", got, want)
					}
				}
				if g.ran.Load() != 1 {
					t.Errorf("the handler ran %d times", g.ran.Load())
				}
			})
		})
	}
}

// A request that is refused takes no more memory than its limit.
func TestBodiesAreBounded(t *testing.T) {
	const limit, requests = 1 << 20, 50
	h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{MaxRequestBytes: limit}, unreached(t))
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range requests {
		r := post(goodKey, endless{})
		r.ContentLength = -1
		wantCode(t, "endless", send(h, r), 413, "REQUEST_TOO_LARGE")
	}
	runtime.ReadMemStats(&after)
	if each := (after.TotalAlloc - before.TotalAlloc) / requests; each > 6*limit { // a growing slice is copied
		t.Errorf("%d bytes for each request above the limit of %d", each, limit)
	}
}

// FuzzMiddleware: whatever a request is, it is answered by one of the listed
// codes or by the handler, and never panics; the same request gets the same
// answer again.
func FuzzMiddleware(f *testing.F) {
	f.Add("POST", goodKey, "/a?b=c", "application/json", []byte(`{"a":1}`))
	f.Add("PUT", `"`+goodKey+`"`, "/%zz?%zz;", "a/b; c", []byte{0xff})
	f.Add("PATCH", "", "//x", ";", []byte(nil))
	f.Fuzz(func(t *testing.T, method, key, target, contentType string, body []byte) {
		runs := 0
		h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{CanonicalJSON: true, MaxRequestBytes: 1000},
			func(w http.ResponseWriter, _ *http.Request) { runs++; w.WriteHeader(http.StatusCreated) })
		request := func() *http.Request {
			r := httptest.NewRequest(http.MethodPost, "/", bytes.NewReader(body))
			r.Method, r.RequestURI = method, target
			r.URL.Path, r.URL.RawQuery, _ = strings.Cut(target, "?")
			r.Header[idempotency.Header] = []string{key}
			r.Header.Set("Content-Type", contentType)
			return r
		}
		first, again := send(h, request()), send(h, request())
		switch {
		case first.Code == 201 && again.Code == 201:
			needed := slices.Contains([]string{"POST", "PUT", "PATCH"}, method)
			if needed && runs != 1 || needed != (again.Header().Get(idempotency.ReplayedHeader) == "true") {
				t.Errorf("%d runs, headers %v", runs, again.Header())
			}
		case first.Code != again.Code || first.Body.String() != again.Body.String() || runs != 0:
			t.Errorf("first %d %s, again %d %s, %d runs", first.Code, first.Body, again.Code, again.Body, runs)
		case !strings.Contains(first.Body.String(), `"code":"`):
			t.Errorf("answer %d %s", first.Code, first.Body)
		}
	})
}
