// Package page is the operator as a web page, which a service mounts beside its own routes. It compiles neither the
// commands nor the agents.
package page

import (
	"bytes"
	"embed"
	"errors"
	"fmt"
	"html/template"
	"log/slog"
	"maps"
	"math"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/internal/core"
)

// Config sets who may do what on the page, and masks bodies.
type Config struct {
	// Authorize returns the rights of a request's sender. An error rejects the request with 403.
	// Default: everybody who reaches the page may read it, except bodies, and change nothing.
	Authorize func(r *http.Request) (operator.Access, error)
	// Mask returns the part of a body that is shown: all of it, less, or nil for nothing. Default: all of it.
	// A message with a hidden part cannot be edited. If Mask panics, everything is hidden.
	Mask func(m operator.MaskedMessage) []byte
	// Title is the name of the service. Default: Config.Program.
	Title string
}

// Page is the operator as a web page. It is an http.Handler for any path prefix that ends in a slash:
//
//	mux.Handle("/operator/", http.StripPrefix("/operator", page))
//
// It needs nothing from other hosts, and works without scripts, which only keep it up to date. It rejects
// changes that another site requests. It is safe for concurrent use.
type Page struct {
	o       *core.Operator
	cfg     Config
	routes  http.Handler
	samples sampler
	known   known
	reads   reads
	jobs    jobs
	ended   chan struct{} // closed by end
	end     func()
	streams chan struct{} // one for each live page that may be open
}

// maxStreams bounds the live pages. Further pages are not updated.
const maxStreams = 100

// New returns the page of a service. The error names every violation in service or cfg.
func New(service operator.Config, cfg Config) (*Page, error) {
	o, err := core.New(service)
	if err != nil {
		return nil, err
	}
	if cfg.Title == "" {
		cfg.Title = o.Config.Program
	}
	if !utf8.ValidString(cfg.Title) || len(cfg.Title) > 100 {
		return nil, errors.New("operator: Config.Title must be UTF-8 of at most 100 bytes")
	}
	cfg.Mask = core.Masking(cfg.Mask)
	p := &Page{o: o, cfg: cfg, streams: make(chan struct{}, maxStreams)}
	p.samples.read = o.ReadStatus
	p.ended = make(chan struct{})
	p.end = sync.OnceFunc(func() { close(p.ended) })
	p.routes = p.guarded(p.mux())
	return p, nil
}

// Close ends live pages and stops running changes after their current step. It waits for the changes, 15 s at most. Give it
// to http.Server.RegisterOnShutdown, so that live pages do not hold up the shutdown. Call it again before you close anything
// that changes use.
func (p *Page) Close() {
	p.end()
	p.reads.close()
	p.jobs.end(closeTimeout)
}

// closeTimeout bounds how long Close waits for changes. A change ends with an entry in the log, which has 10 s.
const closeTimeout = 15 * time.Second

// ServeHTTP implements http.Handler.
func (p *Page) ServeHTTP(w http.ResponseWriter, r *http.Request) { p.routes.ServeHTTP(w, r) }

//go:embed assets
var pageFiles embed.FS

// mux has all addresses of the page on one level, so that relative links work below any prefix.
func (p *Page) mux() *http.ServeMux {
	mux := http.NewServeMux()
	for name, kind := range map[string]string{
		"style.css": "text/css; charset=utf-8", "page.js": "text/javascript; charset=utf-8", "icon.svg": "image/svg+xml",
		"icon-bad.svg": "image/svg+xml",
	} {
		mux.HandleFunc("GET /"+name, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", kind)
			w.Header().Set("Cache-Control", "max-age=300")
			http.ServeFileFS(w, r, pageFiles, "assets/"+name)
		})
	}
	mux.Handle("GET /{$}", p.reader(p.showStatus))
	mux.Handle("GET /live", p.reader(p.live))
	mux.Handle("GET /groups", p.reader(p.showGroups))
	mux.Handle("GET /dead-letters", p.reader(p.showDeadLetters))
	mux.Handle("GET /dead-letter", p.reader(p.showDeadLetter))
	mux.Handle("GET /retrying", p.reader(p.showRetrying))
	mux.Handle("GET /waiting", p.reader(p.showWaiting))
	mux.Handle("GET /running", p.reader(p.showRunning))
	mux.Handle("GET /message", p.reader(p.showStory))
	mux.Handle("GET /limits", p.reader(p.showLimits))
	mux.Handle("GET /log", p.reader(p.showLog))
	mux.Handle("GET /job", p.reader(p.showJob))
	mux.Handle("GET /progress", p.reader(p.progress))
	mux.Handle("GET /preview", p.changer(p.preview))
	mux.Handle("POST /preview", p.changer(p.preview)) // a body is too long for an address
	mux.Handle("POST /apply", p.changer(p.apply))
	mux.Handle("POST /stop", p.changer(p.stop))
	mux.Handle("POST /reset", p.changer(p.reset))
	mux.Handle("POST /pause", p.changer(p.pause))
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		p.fail(w, http.StatusNotFound, "There is no such page.")
	})
	return mux
}

// policy allows only the page's own files, and forbids frames of other sites.
const policy = "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; " +
	"base-uri 'none'; frame-ancestors 'none'"

// guarded sets the headers of every answer, and rejects changes that another site requests.
func (p *Page) guarded(next http.Handler) http.Handler {
	origin := http.NewCrossOriginProtection()
	origin.SetDenyHandler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		p.fail(w, http.StatusForbidden, "Another site sent this request.")
	}))
	next = origin.Handler(next)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "same-origin")
		h.Set("Cache-Control", "no-store")
		if withSlash(w, r) {
			return
		}
		if !strings.HasPrefix(r.URL.Path, "/") { // the prefix was stripped with its slash
			r = r.Clone(r.Context())
			r.URL.Path = "/" + r.URL.Path
		}
		r.Body = http.MaxBytesReader(w, r.Body, maxForm)
		next.ServeHTTP(w, r)
	})
}

// withSlash redirects a request for the page itself without a final slash, because relative links would miss the page.
// It reports whether it did.
func withSlash(w http.ResponseWriter, r *http.Request) bool {
	u, err := url.ParseRequestURI(r.RequestURI)
	if err != nil || strings.Trim(r.URL.Path, "/") != "" || strings.HasSuffix(u.Path, "/") {
		return false
	}
	w.Header().Set("Location", "./"+u.EscapedPath()[strings.LastIndexByte(u.EscapedPath(), '/')+1:]+"/")
	w.WriteHeader(http.StatusTemporaryRedirect)
	return true
}

// maxForm bounds the body of a request, in bytes. An edited body is the largest.
const maxForm = 4 << 20

// visit is one request and its sender's rights.
type visit struct {
	w http.ResponseWriter
	*http.Request
	access operator.Access
}

// reader calls answer if the sender may read.
func (p *Page) reader(answer func(visit)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var access operator.Access
		if p.cfg.Authorize != nil {
			var err error
			if access, err = p.cfg.Authorize(r); err != nil {
				p.fail(w, http.StatusForbidden, "You may not see this.")
				return
			}
		}
		answer(visit{w, r, access})
	})
}

// changer calls answer if the sender may change something.
func (p *Page) changer(answer func(visit)) http.Handler {
	return p.reader(func(v visit) {
		if !v.access.Change || v.access.By == "" || core.Validate(core.Change{By: v.access.By}) != nil {
			p.fail(v.w, http.StatusForbidden, "You may only read.")
			return
		}
		answer(v)
	})
}

// templates are the views, each within the layout.
var templates = parseTemplates()

func parseTemplates() map[string]*template.Template {
	layout := template.Must(template.New("layout.html").Funcs(template.FuncMap{
		"moment": core.Moment, "age": core.Age, "short": core.Short, "plain": core.Plain,
		"speed": speed, "percent": core.Percent, "ago": ago,
		"done": core.Done, "lasting": core.Lasting, "spark": spark, "when": when, "many": many,
		"table": func(found []core.Message, mark bool) messageTable { return messageTable{found, mark} },
	}).ParseFS(pageFiles, "assets/layout.html", "assets/views.html"))
	all := map[string]*template.Template{}
	for _, name := range []string{"status", "groups", "dead-letters", "dead-letter", "retrying", "waiting", "running", "limits", "log", "preview", "job", "reading", "story", "message"} {
		view := template.Must(layout.Clone())
		all[name] = template.Must(view.AddParseTree("content", view.Lookup(name).Tree))
	}
	return all
}

// messageTable shows dead letters in rows, with a box to mark each.
type messageTable struct {
	Messages []core.Message
	Mark     bool
}

// view is the data of the layout and of one view.
type view struct {
	Title   string // of the service
	Program string // the name of the command
	Heading string
	Tab     string // the view's name in the navigation
	Access  operator.Access
	Errors  []string // of parts that did not answer
	// Verdict is the last verdict; nil: unknown.
	Verdict *core.Verdict
	Data    any
}

// ago formats the time since then.
func ago(now, then time.Time) template.HTML {
	return timeElement(then, core.Lasting(now.Sub(then).Seconds()))
}

// when formats a time by its distance from now.
func when(at time.Time) template.HTML {
	if at.IsZero() {
		return "–"
	}
	return timeElement(at, core.Distance(time.Now(), at))
}

// timeElement returns an element that has the exact time as its title.
func timeElement(at time.Time, text string) template.HTML {
	exact := core.Moment(at)
	return template.HTML(fmt.Sprintf(`<time datetime="%s" title="%s">%s</time>`, exact, exact, text))
}

// speed formats a rate per second.
func speed(perSecond *float64) string {
	if *perSecond >= 100 {
		return many(int(math.Round(*perSecond))) + "/s"
	}
	return core.Rate(perSecond) + "/s"
}

// many formats a count with commas.
func many(n int) string {
	text := strconv.Itoa(n)
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}

// render answers with a view.
func (p *Page) render(v visit, name, heading string, data any, err error) {
	p.answer(v.w, http.StatusOK, name, view{p.cfg.Title, p.o.Config.Program, heading, name, v.access, errorLines(err), p.samples.verdict(), data})
}

// fail answers with a message.
func (p *Page) fail(w http.ResponseWriter, code int, text string) {
	p.answer(w, code, "message", view{p.cfg.Title, p.o.Config.Program, http.StatusText(code), "", operator.Access{}, []string{text}, nil, nil})
}

func (p *Page) answer(w http.ResponseWriter, code int, name string, v view) {
	var page bytes.Buffer
	if err := templates[name].ExecuteTemplate(&page, "layout.html", v); err != nil {
		slog.Error("operator: page template failed", slog.String("view", name), slog.Any("error", err))
		http.Error(w, "the page cannot be shown", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.WriteHeader(code)
	_, _ = w.Write(page.Bytes()) // the viewer may have left
}

// fragment renders one part of a view, for a live page.
func (p *Page) fragment(name, part string, data any) string {
	var html bytes.Buffer
	if err := templates[name].ExecuteTemplate(&html, part, data); err != nil {
		slog.Error("operator: page template failed", slog.String("view", name), slog.Any("error", err))
		return ""
	}
	return html.String()
}

func errorLines(err error) []string {
	if err == nil {
		return nil
	}
	return strings.Split(err.Error(), "\n")
}

// maxKnown bounds the remembered values of a field.
const maxKnown = 500

// known has the names and classes that views have shown in this process. Filters complete them. Reading all values would
// read every dead letter of a queue.
type known struct {
	mu             sync.Mutex
	names, classes map[string]bool
	last           time.Time // the newest failure
}

// note remembers the names, classes and times that a view is about to show.
func (k *known) note(found any) {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch found := found.(type) {
	case []core.Group:
		for _, g := range found {
			k.add(g.Sample)
			k.last = later(k.last, g.Last)
		}
	case []core.Message:
		for _, l := range found {
			k.add(l)
		}
	}
}

func (k *known) add(l core.Message) {
	if k.names == nil {
		k.names, k.classes = map[string]bool{}, map[string]bool{}
	}
	remember(k.names, l.Name)
	remember(k.classes, l.Class)
	k.last = later(k.last, l.FailedAt)
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// until returns a time after every failure that a viewer may have seen: now, or later if another clock is ahead.
func (k *known) until(now time.Time) time.Time {
	const most = time.Hour // a clock that is further ahead may show any time
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.last.Sub(now) > most {
		return now
	}
	return later(now, k.last.Add(time.Microsecond))
}

func remember(values map[string]bool, value string) {
	if value != "" && len(values) < maxKnown {
		values[value] = true
	}
}

// lists returns the names and the classes, sorted.
func (k *known) lists() (names, classes []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Sorted(maps.Keys(k.names)), slices.Sorted(maps.Keys(k.classes))
}
