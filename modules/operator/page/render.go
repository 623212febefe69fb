package page

import (
	"bytes"
	"html/template"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"

	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/internal/core"
)

// templates are the views, each with the layout around it.
var templates = parseTemplates()

func parseTemplates() map[string]*template.Template {
	layout := template.Must(template.New("layout.html").Funcs(template.FuncMap{
		"moment": core.Moment, "age": core.Age, "short": core.Short, "plain": core.Plain,
		"rate": core.Rate, "percent": core.Percent,
		"table": func(found []core.Message, mark bool) messageTable { return messageTable{found, mark} },
	}).ParseFS(pageFiles, "assets/layout.html", "assets/parts.html"))
	all := map[string]*template.Template{}
	for _, name := range []string{"status", "groups", "dead-letters", "dead-letter", "waiting", "limits", "log", "preview", "job", "message"} {
		all[name] = template.Must(template.Must(layout.Clone()).ParseFS(pageFiles, "assets/"+name+".html"))
	}
	return all
}

// messageTable are dead letters in rows, with a box to mark each.
type messageTable struct {
	Messages []core.Message
	Mark     bool
}

// view is what the layout shows around the data of one view.
type view struct {
	Title   string // of the service
	Heading string
	Tab     string // the view's name in the navigation
	Access  operator.Access
	Errors  []string // of parts that could not be asked
	Data    any
}

// render answers with a view.
func (p *Page) render(v visit, name, heading string, data any, err error) {
	p.answer(v.w, http.StatusOK, name, view{p.cfg.Title, heading, name, v.access, errorLines(err), data})
}

// fail answers with a message.
func (p *Page) fail(w http.ResponseWriter, code int, text string) {
	p.answer(w, code, "message", view{p.cfg.Title, http.StatusText(code), "", operator.Access{}, []string{text}, nil})
}

func (p *Page) answer(w http.ResponseWriter, code int, name string, v view) {
	var page bytes.Buffer
	if err := templates[name].ExecuteTemplate(&page, "layout.html", v); err != nil {
		slog.Error("operator: page", slog.String("view", name), slog.Any("error", err))
		http.Error(w, "the page cannot be shown", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.WriteHeader(code)
	_, _ = w.Write(page.Bytes()) // a viewer who has left misses nothing
}

// fragment is one part of a view, for a live page.
func (p *Page) fragment(name, part string, data any) string {
	var html bytes.Buffer
	if err := templates[name].ExecuteTemplate(&html, part, data); err != nil {
		slog.Error("operator: page", slog.String("view", name), slog.Any("error", err))
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

// maxKnown bounds the values of a field that are remembered.
const maxKnown = 500

// known are the names and classes that the views have shown since the process began, with which filters complete what is
// typed. To ask for all would read every dead letter of a queue.
type known struct {
	mu             sync.Mutex
	names, classes map[string]bool
}

// learn adds what a view is about to show.
func (k *known) learn(found any) {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch found := found.(type) {
	case []core.Group:
		for _, g := range found {
			k.add(g.Sample)
		}
	case []core.Message:
		for _, l := range found {
			k.add(l)
		}
	case waitingView:
		for _, l := range found.Messages {
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
}

func remember(values map[string]bool, value string) {
	if value != "" && len(values) < maxKnown {
		values[value] = true
	}
}

// lists are the names and the classes in their order.
func (k *known) lists() (names, classes []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Sorted(maps.Keys(k.names)), slices.Sorted(maps.Keys(k.classes))
}
