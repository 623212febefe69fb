package web

import (
	"bytes"
	"context"
	"embed"
	"errors"
	"fmt"
	"html/template"
	"net/http"
	"strings"
	"sync"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
)

// Config says what the page stands before.
type Config struct {
	// API serves everything but the page. Required.
	API http.Handler
	// Flow counts what goes through the shop. Required.
	Flow flow.Flow
	// Backlog tells what is on its way. Required. With an error, or of what is nil, the page says that it is not known.
	Backlog func(context.Context) (flow.Backlog, error)
	// Trials are the buttons that try to break the shop. nil: there are none.
	Trials Trials
	// Servers have a button each that switches them off, beside those of Trials.
	Servers []Server
	// Limits tells what a user has left of the limits. Required.
	Limits Limits
	// Operator is the address of the operator's page; "" for none.
	Operator string
}

// Page serves the page and, behind it, the API. It is safe for concurrent use.
type Page struct {
	cfg     Config
	routes  http.Handler
	home    []byte
	ended   chan struct{} // closed by end
	end     func()
	streams chan struct{} // one for each page that is live
}

// maxStreams is how many pages are live at a time; others show what they had loaded.
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

// Close ends the streams of the pages that are live. Give it to http.Server.RegisterOnShutdown, so that they do not
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
	// No http.ServeMux: it would redirect what the API answers by itself.
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

// homeOr answers a browser that asks for / with the page, and everybody else as ever.
func (p *Page) homeOr(api http.Handler) http.Handler {
	home := guarded(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		_, _ = w.Write(p.home) // a viewer who has left misses nothing
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

// policy lets the page load nothing but its own files, and no other site show it in a frame.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; form-action 'self'; " +
	"base-uri 'none'; frame-ancestors 'none'"

// maxForm bounds what a request may carry.
const maxForm = 4 << 10

// guarded sets the headers of every answer, and refuses requests that change something on behalf of another site.
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
