// Package web is the page of the shop: a map of seats to click, a live view of the work behind it, and buttons that
// inject faults.
//
// The page buys and reads through the API, as every client does. For faults, such as switching a server off, it has
// addresses of its own below /shop/, which exist only with Config.Trials.
package web

import (
	"bytes"
	"context"
	"embed"
	"errors"
	"fmt"
	"html/template"
	"net/http"
	"strconv"
	"strings"
	"sync"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
)

// Config configures the page.
type Config struct {
	// API serves everything but the page. Required.
	API http.Handler
	// Flow counts the work of the shop. Required.
	Flow flow.Flow
	// Backlog counts the messages on their way. Required. The page shows an error, or a nil count, as unknown.
	Backlog func(context.Context) (flow.Backlog, error)
	// Trials are the buttons that inject faults. nil: there are none.
	Trials Trials
	// Servers have one button each that switches them off, beside the buttons of Trials.
	Servers []Server
	// Limits are shown with how much of them a user has left. Required.
	Limits Limits
	// Operator is the address of the operator's page; "" for none.
	Operator string
}

// Page serves the page and, for all other requests, the API. It is safe for concurrent use.
type Page struct {
	cfg     Config
	routes  http.Handler
	home    []byte
	ended   chan struct{} // closed by end
	end     func()
	streams chan struct{} // one for each page that is live
}

// maxStreams bounds the live pages. Further pages are not updated.
const maxStreams = 100

//go:embed page
var files embed.FS

var homeTemplate = template.Must(template.ParseFS(files, "page/home.html"))

// New returns the page.
func New(cfg Config) (*Page, error) {
	if cfg.API == nil || cfg.Flow == nil || cfg.Backlog == nil || cfg.Limits.Limiter == nil {
		return nil, errors.New("web: API, Flow, Backlog and Limits are required")
	}
	var home bytes.Buffer
	if err := homeTemplate.Execute(&home, cfg); err != nil {
		return nil, fmt.Errorf("web: %w", err)
	}
	p := &Page{cfg: cfg, home: home.Bytes(), streams: make(chan struct{}, maxStreams), ended: make(chan struct{})}
	p.end = sync.OnceFunc(func() { close(p.ended) })
	p.routes = p.route()
	return p, nil
}

// Close ends the streams of live pages. Give it to http.Server.RegisterOnShutdown, so that they do not
// hold up the shutdown.
func (p *Page) Close() { p.end() }

// ServeHTTP implements http.Handler.
func (p *Page) ServeHTTP(w http.ResponseWriter, r *http.Request) { p.routes.ServeHTTP(w, r) }

func (p *Page) route() http.Handler {
	own := http.NewServeMux()
	for name, kind := range map[string]string{
		"style.css": "text/css; charset=utf-8", "icon.svg": "image/svg+xml",
		"shop.js": javaScript, "api.js": javaScript, "live.js": javaScript, "trials.js": javaScript, "buying.js": javaScript,
	} {
		own.HandleFunc("GET /shop/"+name, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", kind)
			http.ServeFileFS(w, r, files, "page/"+name)
		})
	}
	own.HandleFunc("GET /shop/live", p.live)
	if p.cfg.Trials != nil {
		own.HandleFunc("POST /shop/poison", p.poison)
		own.HandleFunc("POST /shop/slow", p.slow)
		own.HandleFunc("POST /shop/outage", p.outage)
	}
	page, home, api := guarded(own), p.homeOr(p.cfg.API), p.watched(p.cfg.API)
	// This is no http.ServeMux, because it would redirect paths that the API answers by itself.
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/":
			home.ServeHTTP(w, r)
		case strings.HasPrefix(r.URL.Path, "/shop/"):
			page.ServeHTTP(w, r)
		default:
			api.ServeHTTP(w, r)
		}
	})
}

const javaScript = "text/javascript; charset=utf-8"

// homeOr answers a browser's request for / with the page, and all other requests with the API.
func (p *Page) homeOr(api http.Handler) http.Handler {
	home := guarded(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		_, _ = w.Write(p.home) // the viewer may have left
	}))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Add("Vary", "Accept")
		reads := r.Method == http.MethodGet || r.Method == http.MethodHead
		if reads && strings.Contains(strings.Join(r.Header.Values("Accept"), ","), "text/html") {
			home.ServeHTTP(w, r)
			return
		}
		api.ServeHTTP(w, r)
	})
}

// policy allows only the page's own files, and forbids frames of other sites.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; form-action 'self'; " +
	"base-uri 'none'; frame-ancestors 'none'"

// maxForm bounds the body of a request, in bytes.
const maxForm = 4 << 10

// guarded sets the headers of every answer, and rejects changes that another site requests.
func guarded(next http.Handler) http.Handler {
	next = http.NewCrossOriginProtection().Handler(next)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "same-origin")
		h.Set("Cache-Control", "no-store")
		r.Body = http.MaxBytesReader(w, r.Body, maxForm)
		next.ServeHTTP(w, r)
	})
}

// watched counts the answers to POSTs.
func (p *Page) watched(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPost || !strings.HasPrefix(r.URL.Path, "/api/") {
			next.ServeHTTP(w, r)
			return
		}
		answer := &answer{ResponseWriter: w, status: http.StatusOK}
		next.ServeHTTP(answer, r)
		replayed := ""
		if w.Header().Get("Idempotency-Replayed") == "true" {
			replayed = ", replayed"
		}
		p.cfg.Flow.Note(flow.Request, fmt.Sprintf("POST %s: %d%s", short(r.URL.Path), answer.status, replayed))
	})
}

// maxPath bounds the part of a path that is shown, in bytes.
const maxPath = 80

func short(path string) string {
	if len(path) <= maxPath {
		return path
	}
	return path[:maxPath] + "…"
}

// answer remembers the status.
type answer struct {
	http.ResponseWriter
	status int
}

// WriteHeader implements http.ResponseWriter.
func (a *answer) WriteHeader(status int) {
	a.status = status
	a.ResponseWriter.WriteHeader(status)
}

// Unwrap is for http.ResponseController.
func (a *answer) Unwrap() http.ResponseWriter { return a.ResponseWriter }

// Trials inject faults. They may be called from any goroutine.
type Trials interface {
	// Poison sends the consumer a message that no attempt can process. It fails if too many wait or are dead.
	Poison(ctx context.Context) error
	// SlowDown makes consumers with -trials take two seconds for a message, or ends that.
	SlowDown(ctx context.Context, on bool) error
	// Slow reports whether consumers are to be slow.
	Slow(ctx context.Context) (bool, error)
}

// Server can be switched off. Its methods may be called from any goroutine.
type Server interface {
	// Name is the name for the buttons: postgres, redis or rabbitmq.
	Name() string
	Off() bool
	Switch(on bool)
}

// poison sends the consumer a message that cannot be processed.
func (p *Page) poison(w http.ResponseWriter, r *http.Request) {
	if err := p.cfg.Trials.Poison(r.Context()); err != nil {
		http.Error(w, "too many messages wait or are dead", http.StatusServiceUnavailable)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// slow makes the consumers slow, or fast again.
func (p *Page) slow(w http.ResponseWriter, r *http.Request) {
	on, ok := readSwitch(w, r)
	if !ok {
		return
	}
	if err := p.cfg.Trials.SlowDown(r.Context(), on); err != nil {
		http.Error(w, "the consumer cannot be switched", http.StatusServiceUnavailable)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// outage switches a server off, or on again.
func (p *Page) outage(w http.ResponseWriter, r *http.Request) {
	on, ok := readSwitch(w, r)
	if !ok {
		return
	}
	for _, server := range p.cfg.Servers {
		if server.Name() == r.PostForm.Get("server") {
			server.Switch(!on)
			w.WriteHeader(http.StatusNoContent)
			return
		}
	}
	http.Error(w, "there is no such server", http.StatusBadRequest)
}

// readSwitch reads the field on. If it is invalid, readSwitch answers the request.
func readSwitch(w http.ResponseWriter, r *http.Request) (on, ok bool) {
	if err := r.ParseForm(); err != nil {
		http.Error(w, "the form cannot be read", http.StatusBadRequest)
		return false, false
	}
	on, err := strconv.ParseBool(r.PostForm.Get("on"))
	if err != nil {
		http.Error(w, "on is neither true nor false", http.StatusBadRequest)
		return false, false
	}
	return on, true
}
