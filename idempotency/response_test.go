package idempotency_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"log"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// The first answer equals the handler's answer without the middleware.
func TestFirstAnswerIsTheHandlersOwn(t *testing.T) {
	t.Parallel()
	for name, fn := range map[string]http.HandlerFunc{
		"nothing": func(http.ResponseWriter, *http.Request) {},
		"headers after the status": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusCreated)
			w.Header().Set("X-Late", "1")
			w.Header().Set("Content-Type", "text/plain")
			_, _ = io.WriteString(w, "{}")
		},
		"headers after the body": func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, "<html>")
			w.Header().Set("X-Late", "1")
		},
		"trailers":          trailers(false),
		"trailers, flushed": trailers(true),
	} {
		want := overWire(t, fn)
		got := overWire(t, protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{}, fn))
		if got != want {
			t.Errorf("%s:\n%s\nwithout the middleware:\n%s", name, got, want)
		}
	}
}

func trailers(flush bool) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Trailer", "X-Sum")
		_, _ = io.WriteString(w, "body")
		if flush {
			_ = http.NewResponseController(w).Flush()
		}
		w.Header().Set("X-Sum", "1")
		w.Header().Set(http.TrailerPrefix+"X-More", "2")
	}
}

func TestInvalidStatusPanics(t *testing.T) {
	t.Parallel()
	h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{}, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(42)
	})
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	send(h, post(goodKey, nil))
}

func TestHijackLeavesATombstone(t *testing.T) {
	t.Parallel()
	runs := 0
	server := httptest.NewServer(protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{},
		func(w http.ResponseWriter, _ *http.Request) {
			runs++
			conn, _, err := http.NewResponseController(w).Hijack()
			if err != nil {
				t.Errorf("Hijack: %v", err)
				return
			}
			_, _ = io.WriteString(conn, "HTTP/1.1 201 Created\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
			_ = conn.Close()
		}))
	defer server.Close()
	for _, want := range []string{"201", "409", "409"} {
		conn, err := net.Dial("tcp", server.Listener.Addr().String())
		must(t, err)
		_, _ = io.WriteString(conn, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nIdempotency-Key: "+goodKey+"\r\n\r\n")
		line, err := bufio.NewReader(conn).ReadString('\n')
		if err != nil || !strings.Contains(line, want) {
			t.Errorf("answer %q, %v; want %s", line, err, want)
		}
		_ = conn.Close()
	}
	if runs != 1 {
		t.Errorf("%d runs", runs)
	}
}

// Middleware around this one sees and sets the same header as the handler.
func TestHeadersAround(t *testing.T) {
	t.Parallel()
	h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{}, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Add("Vary", "Accept")
		w.Header().Del("X-Outer")
		w.Header().Set("Location", "/1")
		w.WriteHeader(http.StatusCreated)
	})
	outer := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Vary", "Origin")
		w.Header().Set("X-Outer", "1")
		h.ServeHTTP(w, r)
	})
	first := send(outer, post(goodKey, nil)).Header()
	if got := first.Values("Vary"); len(got) != 2 || got[0] != "Origin" || first.Get("X-Outer") != "" {
		t.Errorf("first: %v", first)
	}
	again := send(outer, post(goodKey, nil)).Header()
	if again.Get("Vary") != "Origin" || again.Get("X-Outer") != "1" || again.Get("Location") != "/1" {
		t.Errorf("again: %v", again)
	}
}

// A replay that the handler itself finds has none of the headers that the handler set.
func TestHeadersOfADiscardedRun(t *testing.T) {
	t.Parallel()
	h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{}, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Set-Cookie", "a=b")
		w.Header().Set("X-Outer", "2")
		claim, _ := driver.ClaimFrom(r.Context())
		claim.Settle(driver.BeginResult{
			State: driver.Completed, Fingerprint: claim.Fingerprint, Response: driver.Response{Status: 201},
		}, true)
		w.WriteHeader(http.StatusConflict)
	})
	rec := httptest.NewRecorder()
	rec.Header().Set("X-Outer", "1")
	h.ServeHTTP(rec, post(goodKey, nil))
	if got := rec.Header(); rec.Code != 201 || got.Get("Set-Cookie") != "" || got.Get("X-Outer") != "1" {
		t.Errorf("%d %v", rec.Code, got)
	}
}

// Each answer has its own Date; a kept Date is never replayed.
func TestDateIsFresh(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{}, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Date", "Thu, 01 Jan 1970 00:00:00 GMT")
	}))
	defer server.Close()
	for _, want := range []int{1970, time.Now().UTC().Year()} {
		r := post(goodKey, nil)
		r.RequestURI = ""
		r.URL.Scheme, r.URL.Host = "http", server.Listener.Addr().String()
		res, err := server.Client().Do(r)
		must(t, err)
		_ = res.Body.Close()
		if date, err := http.ParseTime(res.Header.Get("Date")); err != nil || date.Year() != want && date.Year() != want+1 {
			t.Errorf("Date is %q; want one of %d", res.Header.Get("Date"), want)
		}
	}
}

// mute is a writer that cannot flush.
type mute struct{ http.ResponseWriter }

// If the writer cannot flush, nothing is streamed and the response is kept.
func TestFlushWithoutAFlusher(t *testing.T) {
	t.Parallel()
	h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{}, func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "part")
		if err := http.NewResponseController(w).Flush(); !errors.Is(err, http.ErrNotSupported) {
			t.Errorf("Flush = %v; want ErrNotSupported", err)
		}
		_, _ = io.WriteString(w, "s")
	})
	for _, replayed := range []string{"", "true"} {
		rec := httptest.NewRecorder()
		h.ServeHTTP(mute{rec}, post(goodKey, nil))
		if rec.Code != 200 || rec.Body.String() != "parts" || rec.Header().Get(idempotency.ReplayedHeader) != replayed {
			t.Errorf("%d %q %v", rec.Code, rec.Body, rec.Header())
		}
	}
}

func TestControlsOfTheConnection(t *testing.T) {
	t.Parallel()
	h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{}, func(w http.ResponseWriter, _ *http.Request) {
		c := http.NewResponseController(w)
		if err := errors.Join(c.SetReadDeadline(time.Now().Add(time.Minute)), c.SetWriteDeadline(time.Now().Add(time.Minute)), c.EnableFullDuplex()); err != nil {
			t.Error(err)
		}
	})
	if got := overWire(t, h); !strings.HasPrefix(got, "200 OK") {
		t.Error(got)
	}
}

func TestWriterRefusesWhatItCannotDo(t *testing.T) {
	t.Parallel()
	h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{}, func(w http.ResponseWriter, _ *http.Request) {
		c := http.NewResponseController(w)
		_, _, hijack := c.Hijack()
		for what, err := range map[string]error{
			"SetWriteDeadline": c.SetWriteDeadline(time.Time{}), "SetReadDeadline": c.SetReadDeadline(time.Time{}),
			"EnableFullDuplex": c.EnableFullDuplex(), "Hijack": hijack,
		} {
			if !errors.Is(err, http.ErrNotSupported) {
				t.Errorf("%s = %v", what, err)
			}
		}
		w.WriteHeader(http.StatusEarlyHints)
		w.WriteHeader(http.StatusNoContent)
		if _, err := io.WriteString(w, "body"); !errors.Is(err, http.ErrBodyNotAllowed) {
			t.Errorf("Write after 204 = %v", err)
		}
	})
	for range 2 {
		if rec := send(h, post(goodKey, nil)); rec.Code != 204 || rec.Body.Len() != 0 {
			t.Errorf("%d %q", rec.Code, rec.Body)
		}
	}
}

func TestDeniedHeadersAreNeverReplayed(t *testing.T) {
	t.Parallel()
	denied := []string{
		"Set-Cookie", "Date", "Connection", "Keep-Alive", "Transfer-Encoding", "Trailer", "Upgrade", "Www-Authenticate",
		"Access-Control-Allow-Origin", "Ratelimit-Remaining", "X-Ratelimit-Reset", "Retry-After", "Authorization",
	}
	for _, name := range denied {
		_, err := idempotency.NewMiddleware(idempotencytest.NewStore(), idempotency.UnsafeGlobalScope, idempotency.MiddlewareConfig{
			KeepHeaders: []string{"Location", strings.ToLower(name)},
		})
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("KeepHeaders with %s: %v", name, err)
		}
	}

	if clean := driver.CleanHeader(http.Header{"Idempotency-Replayed": {"true"}, "Location": {"/1"}}); len(clean) != 1 {
		t.Errorf("CleanHeader leaves %v", clean)
	}

	// A record that another system wrote may hold any header.
	store, header := idempotencytest.NewStore(), http.Header{"Location": {"/1"}}
	for _, name := range denied {
		header[name] = []string{"x"}
	}
	h := protect(t, store, idempotency.MiddlewareConfig{}, func(_ http.ResponseWriter, r *http.Request) {
		claim, _ := driver.ClaimFrom(r.Context())
		claim.Settle(driver.BeginResult{
			State: driver.Completed, Fingerprint: claim.Fingerprint,
			Response: driver.Response{Status: 201, Header: header},
		}, false)
	})
	for range 2 {
		rec := send(h, post(goodKey, nil))
		if rec.Code != 201 || rec.Header().Get("Location") != "/1" {
			t.Errorf("%d %v", rec.Code, rec.Header())
		}
		for _, name := range denied {
			if rec.Header().Get(name) != "" {
				t.Errorf("%s was sent", name)
			}
		}
	}
}

func TestKeepHeadersOfYourOwn(t *testing.T) {
	t.Parallel()
	h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{KeepHeaders: []string{"x-order"}},
		func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X-Order", "1")
			w.Header().Set("Location", "/1")
		})
	send(h, post(goodKey, nil))
	again := send(h, post(goodKey, nil)).Header()
	if again.Get("X-Order") != "1" || again.Get("Location") != "" {
		t.Errorf("replayed headers %v", again)
	}
}

// A header that is allowed twice does not let another one through.
func TestKeepHeadersNamedTwice(t *testing.T) {
	t.Parallel()
	h := protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{KeepHeaders: []string{"Location", "location"}},
		func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Location", "/1")
			w.Header().Set("X-Session", "secret")
		})
	for _, want := range []string{"secret", ""} {
		if got := send(h, post(goodKey, nil)).Header(); got.Get("X-Session") != want || got.Get("Location") != "/1" {
			t.Errorf("header %v; want X-Session %q", got, want)
		}
	}
}

// A replay sends the first answer's bytes, with its length.
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
			w.WriteHeader(http.StatusInternalServerError) // the first status counts
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

// An answer that the handler itself found counts as a replay, even if it is longer than a response may be now.
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

// Random handlers answer behind the middleware as they do on net/http alone, including the errors that their writes
// return. A replay equals the first answer. A handler is identified by its number.
func TestDifferentialRecorder(t *testing.T) {
	t.Parallel()
	d := newDuel(t)
	for n := range testenv.Sequences(t, 400) {
		d.play(uint64(n))
	}
	t.Logf("%d replayed, %d not kept", d.replayed, d.unkept)
	if d.replayed == 0 || d.unkept == 0 {
		t.Error("that proves little")
	}
}

const duelLimit = 5000 // limit of a kept response

// duel runs one handler on net/http alone and behind the middleware.
type duel struct {
	t                *testing.T
	server           *httptest.Server
	handler          *scriptedHandler // the current one
	done             chan struct{}    // for each request that was served
	replayed, unkept int
}

func newDuel(t *testing.T) *duel {
	t.Helper()
	d := &duel{t: t, done: make(chan struct{}, 1)}
	run := func(w http.ResponseWriter, _ *http.Request) { d.handler.serve(w) }
	mux := http.NewServeMux()
	mux.HandleFunc("/alone", run)
	mux.Handle("/kept", protect(t, idempotencytest.NewStore(), idempotency.MiddlewareConfig{MaxResponseBytes: duelLimit}, run))
	d.server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mux.ServeHTTP(w, r)
		d.done <- struct{}{}
	}))
	d.server.Config.ErrorLog = log.New(io.Discard, "", 0)
	d.server.Start()
	d.server.Client().Transport.(*http.Transport).DisableCompression = true
	t.Cleanup(d.server.Close)
	return d
}

// seen is an answer as a client receives it.
type seen struct {
	status int
	header http.Header
	body   string
	err    string   // of reading the body
	writes []string // results of the handler's writes
}

func (d *duel) ask(path, key string) seen {
	d.t.Helper()
	d.handler.told, d.handler.runs = nil, 0
	r, err := http.NewRequestWithContext(d.t.Context(), http.MethodPost, d.server.URL+path, nil)
	if err != nil {
		d.t.Fatal(err)
	}
	r.Header.Set(idempotency.Header, key)
	res, err := d.server.Client().Do(r)
	if err != nil {
		d.t.Fatal(err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	<-d.done
	res.Header.Del("Date")
	s := seen{status: res.StatusCode, header: res.Header, body: string(body), writes: d.handler.told}
	if err != nil {
		s.err = err.Error()
	}
	return s
}

func (d *duel) play(n uint64) {
	d.t.Helper()
	d.handler = &scriptedHandler{seed: n}
	key := string(idempotency.NewKey())
	alone := d.ask("/alone", key)
	first := d.ask("/kept", key)
	if alone.String() != first.String() {
		d.t.Errorf("handler %d:\nalone: %v\nbehind the middleware: %v", n, alone, first)
		return
	}
	h := *d.handler
	again := d.ask("/kept", key)
	switch {
	case d.handler.runs > 0:
		d.unkept++
		if final(first.status) {
			d.t.Errorf("handler %d: run again after %v", n, first)
		}
	case again.status == http.StatusConflict && strings.Contains(again.body, "IDEMPOTENCY_RESULT_UNAVAILABLE"):
		d.unkept++
		if whole := first.err == "" && !h.flushed && len(first.body) < duelLimit/2; whole {
			d.t.Errorf("handler %d: not kept: %v", n, first)
		}
	default:
		d.replayed++
		d.same(n, first, again)
	}
}

// same compares the parts that a replay must share with the first answer.
func (d *duel) same(n uint64, first, again seen) {
	d.t.Helper()
	if again.status != first.status || again.body != first.body || first.err != "" || again.err != "" {
		d.t.Errorf("handler %d: first %v\nagain %v", n, first, again)
	}
	for _, name := range []string{"Content-Type", "Location", "Cache-Control", "X-Content-Type-Options", "Content-Encoding"} {
		if !slices.Equal(first.header[name], again.header[name]) {
			d.t.Errorf("handler %d: %s was %q, is %q in the replay", n, name, first.header[name], again.header[name])
		}
	}
}

func (s seen) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d %.80q (%d bytes) %s %q", s.status, s.body, len(s.body), s.err, s.writes)
	for _, name := range slices.Sorted(maps.Keys(s.header)) {
		fmt.Fprintf(&b, "\n\t%s: %q", name, s.header[name])
	}
	return b.String()
}

// scriptedHandler takes the same random steps in each run.
type scriptedHandler struct {
	seed    uint64
	runs    int
	flushed bool
	told    []string
}

func (h *scriptedHandler) serve(w http.ResponseWriter) {
	h.runs++
	random := rand.New(rand.NewPCG(7, h.seed))
	pick := func(values ...string) string { return values[random.IntN(len(values))] }
	for range 1 + random.IntN(6) {
		switch header := w.Header(); random.IntN(12) {
		case 0:
			header["Content-Type"] = nil
		case 1:
			header[pick("Content-Type", "content-type")] = []string{pick("application/json", "text/html", "")}
		case 2, 3:
			header.Set("Content-Length", pick("0", "3", "6", "2048", "3000", "-1", "x", ""))
		case 4:
			header[pick("Location", "location", "LOCATION")] = []string{pick("/1", "/2"), "/3"}
		case 5:
			header.Set(pick("Cache-Control", "X-Content-Type-Options", "Content-Encoding", "X-Other"), pick("no-store", "nosniff", "gzip"))
		case 6:
			status, err := strconv.Atoi(pick("200", "201", "204", "304", "404", "422", "500", "102"))
			if err != nil {
				panic(err)
			}
			w.WriteHeader(status)
		case 7:
			http.Error(w, pick("no", "not now"), http.StatusUnprocessableEntity)
		case 8:
			if random.IntN(3) == 0 {
				h.tell(0, http.NewResponseController(w).Flush())
				h.flushed = true
			}
		default:
			h.tell(io.WriteString(w, pick("", "abc", "<html>", "{}", strings.Repeat("x", 1000), strings.Repeat("y", 3000))))
		}
	}
}

func (h *scriptedHandler) tell(n int, err error) {
	for _, known := range []error{http.ErrContentLength, http.ErrBodyNotAllowed} {
		if errors.Is(err, known) {
			err = known
		}
	}
	h.told = append(h.told, fmt.Sprint(n, " ", err))
}
