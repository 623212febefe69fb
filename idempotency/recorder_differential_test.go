package idempotency_test

import (
	"errors"
	"fmt"
	"io"
	"log"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// Random handlers answer behind the middleware as they do on net/http alone, to
// the errors that their writes return, and a replay is what was sent. A handler
// is told by its number.
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

const duelLimit = 5000 // of a kept response

// duel runs one handler on net/http alone and behind the middleware.
type duel struct {
	t                *testing.T
	server           *httptest.Server
	handler          *scriptedHandler // of this moment
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

// seen is an answer as a client gets it.
type seen struct {
	status int
	header http.Header
	body   string
	err    string   // of reading the body
	writes []string // what the handler was told
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

// same compares what a replay must have of the first answer.
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

// scriptedHandler takes the same random steps each time.
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
