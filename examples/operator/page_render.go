package operator

import (
	"bytes"
	"html/template"
	"log/slog"
	"net/http"
	"strings"
)

// templates are the views, each with the layout around it.
var templates = parseTemplates()

func parseTemplates() map[string]*template.Template {
	layout := template.Must(template.New("layout.html").Funcs(template.FuncMap{
		"moment": moment, "age": age, "short": short, "plain": plain,
		"rate": rate, "percent": percent,
		"letters": func(found []letter, mark bool) letterTable { return letterTable{found, mark} },
	}).ParseFS(pageFiles, "page/layout.html", "page/parts.html"))
	all := map[string]*template.Template{}
	for _, name := range []string{"status", "groups", "letters", "letter", "waiting", "limits", "log", "preview", "job", "message"} {
		all[name] = template.Must(template.Must(layout.Clone()).ParseFS(pageFiles, "page/"+name+".html"))
	}
	return all
}

// letterTable are letters in rows, with a box to mark each.
type letterTable struct {
	Letters []letter
	Mark    bool
}

// view is what the layout shows around the data of one view.
type view struct {
	Title   string // of the service
	Heading string
	Tab     string // the view's name in the navigation
	Access  Access
	Errors  []string // of parts that could not be asked
	Data    any
}

// render answers with a view.
func (p *Page) render(v visit, name, heading string, data any, err error) {
	p.answer(v.w, http.StatusOK, name, view{p.cfg.Title, heading, name, v.access, errorLines(err), data})
}

// fail answers with a message.
func (p *Page) fail(w http.ResponseWriter, code int, text string) {
	p.answer(w, code, "message", view{p.cfg.Title, http.StatusText(code), "", Access{}, []string{text}, nil})
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
