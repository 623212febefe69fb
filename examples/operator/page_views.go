package operator

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/holdfast-go/holdfast/outbox"
)

func (p *Page) showStatus(v visit) {
	p.render(v, "status", "Status", p.samples.sample(v.Context()), nil)
}

// asked is a view of what a query chooses.
type asked struct {
	View   string // its address
	Query  query
	Places []string // all that can be chosen
	// Names and Classes are some that can be.
	Names, Classes []string
	Found          any
	// More says that there may be more than what was found.
	More bool
	// Next is the cursor of the last that was found where all are of one outbox, and its list goes on behind it.
	Next string
	// First says that the list begins with its first.
	First bool
	// Part says that not all could be seen.
	Part bool
}

// ask answers with what the query of a request finds.
func (p *Page) ask(v visit, name, heading, kind string, find func(context.Context, *query) (any, bool, error)) {
	if err := v.ParseForm(); err != nil {
		p.fail(v.w, http.StatusBadRequest, "The address cannot be read.")
		return
	}
	q, err := p.o.parseQuery(v.Form, kind)
	if err != nil {
		p.fail(v.w, http.StatusBadRequest, oneLine(err))
		return
	}
	ctx, cancel := context.WithTimeout(v.Context(), readTimeout)
	defer cancel()
	found, more, err := find(ctx, &q)
	if refused, ok := errors.AsType[refusal](err); ok {
		p.fail(v.w, refused.code, refused.text)
		return
	}
	p.known.learn(found)
	names, classes := p.known.lists()
	shown := asked{View: name, Query: q, Places: p.o.placeNames(kind), Names: names, Classes: classes, Found: found, More: more, First: q.s.Behind == "", Part: err != nil}
	if more && len(q.places) == 1 {
		shown.Next = lastCursor(found)
	}
	p.render(v, name, heading, shown, err)
}

// Several says that an outbox is among several places: alone its list would have a next page.
func (a asked) Several() bool {
	return len(a.Query.places) > 1 && slices.ContainsFunc(a.Query.places, func(p place) bool { return p.kind == kindOutbox })
}

// lastCursor is that of the last letter that was found; empty: there is none.
func lastCursor(found any) string {
	if waiting, ok := found.(waitingView); ok {
		found = waiting.Letters
	}
	letters, _ := found.([]letter)
	if len(letters) == 0 {
		return ""
	}
	return letters[len(letters)-1].Cursor
}

// refusal is an error that is the whole answer.
type refusal struct {
	code int
	text string
}

func (r refusal) Error() string { return r.text }

// placeNames are those of a kind, or all.
func (o *Operator) placeNames(kind string) []string {
	var names []string
	for _, p := range o.places() {
		if kind == "" || p.kind == kind {
			names = append(names, p.name)
		}
	}
	return names
}

func (p *Page) showGroups(v visit) {
	p.ask(v, "groups", "Dead letters by kind", "", func(ctx context.Context, q *query) (any, bool, error) {
		q.s.Behind = ""
		q.Del("after") // a page of a list is no choice
		all, err := eachPlace(ctx, q.places, func(ctx context.Context, at place) ([]group, error) { return at.groups(ctx, q.s) })
		slices.SortStableFunc(all, func(a, b group) int { return cmp.Compare(b.Count, a.Count) })
		return all, false, err
	})
}

func (p *Page) showLetters(v visit) {
	p.ask(v, "letters", "Dead letters", "", func(ctx context.Context, q *query) (any, bool, error) {
		q.s.Limit = cmp.Or(q.s.Limit, listed)
		all, err := eachPlace(ctx, q.places, func(ctx context.Context, at place) ([]letter, error) { return at.list(ctx, q.at(at), false) })
		if len(q.places) > 1 { // a list of one goes on behind its last
			slices.SortStableFunc(all, func(a, b letter) int { return a.FailedAt.Compare(b.FailedAt) })
		}
		more := len(all) >= q.s.Limit
		return all[:min(len(all), q.s.Limit)], more, err
	})
}

func (p *Page) showWaiting(v visit) {
	parked := v.FormValue("parked") != ""
	p.ask(v, "waiting", "Messages to be published", kindOutbox, func(ctx context.Context, q *query) (any, bool, error) {
		f := outbox.WaitingFilter{Parked: parked, Name: q.s.Name, Key: q.s.Key, Limit: cmp.Or(q.s.Limit, listed), After: q.s.Behind}
		all, err := eachPlace(ctx, q.places, func(ctx context.Context, at place) ([]letter, error) { return p.o.waitingAt(ctx, at.name, f) })
		return waitingView{parked, all}, len(all) >= f.Limit, err
	})
}

// waitingView are messages that an outbox holds.
type waitingView struct {
	Parked  bool
	Letters []letter
}

// oneLetter is a letter with what stands around it.
type oneLetter struct {
	letter
	Trace string
	// Body says what may be seen of the body: it is nil where it was not asked for.
	Body     *string
	Editable bool
	// Behind are messages of the same key that wait in the outbox, and Parked how many wait for a consumer.
	Behind []letter
	Parked int
}

func (p *Page) showLetter(v visit) {
	p.ask(v, "letter", "One dead letter", "", func(ctx context.Context, q *query) (any, bool, error) {
		at, s, err := q.one()
		if err != nil {
			return nil, false, err
		}
		found, err := at.list(ctx, s, true)
		if err != nil {
			return nil, false, err
		}
		if len(found) == 0 {
			return nil, false, refusal{http.StatusNotFound, "There is no such dead letter. It was retried or dropped."}
		}
		one := oneLetter{letter: found[0], Trace: traceID(found[0].Headers["traceparent"])}
		if v.access.Bodies && v.FormValue("body") != "" {
			p.uncover(&one)
		} else {
			one.Headers = nil
		}
		one.Behind, one.Parked, err = p.o.behind(ctx, at, one.Key)
		return one, false, err
	})
}

// uncover adds the body, as far as the service lets it be seen.
func (p *Page) uncover(one *oneLetter) {
	body := one.bytes()
	shown := one.masked(p.cfg.Mask)
	// Forms change the ends of lines that are not those of Unix, and no page can have a NUL.
	one.Editable = bytes.Equal(shown, body) && utf8.Valid(body) && !bytes.ContainsAny(body, "\r\x00") && len(body) <= maxEdit
	if shown == nil {
		hidden := hiddenByService
		one.Body = &hidden
		return
	}
	one.Body = readable(shown)
}

// readable is a body for the eye. It is not much longer than the body, whoever has sent that.
func readable(body []byte) *string {
	text := string(body)
	var indented bytes.Buffer
	switch {
	case !utf8.Valid(body):
		text = fmt.Sprintf("%d bytes that are no text, in base64:\n%s", len(body), base64.StdEncoding.EncodeToString(body))
	case !nestsDeep(body) && json.Indent(&indented, body, "", "  ") == nil && indented.Len() <= maxShown:
		text = indented.String()
	}
	if len(text) > maxShown {
		text = fmt.Sprintf("%s\n… the first %d bytes; `show` of the terminal prints all %d of the body", strings.ToValidUTF8(text[:maxShown], ""), maxShown, len(body))
	}
	return &text
}

// maxShown bounds what is shown of a body, in bytes. What may be edited is shown whole.
const maxShown = maxEdit

// nestsDeep reports whether JSON may nest so deep that its indents are longer than all else.
func nestsDeep(body []byte) bool {
	const deep = 50
	depth := 0
	for _, c := range body {
		switch c {
		case '[', '{':
			depth++
		case ']', '}':
			depth--
		}
		if depth > deep {
			return true
		}
	}
	return false
}

// traceID is that of a W3C traceparent: https://www.w3.org/TR/trace-context/#traceparent-header.
func traceID(traceparent string) string {
	const from, to = len("00-"), len("00-") + 32
	if len(traceparent) < to {
		return ""
	}
	return traceparent[from:to]
}

func (p *Page) showLog(v visit) {
	without := v.FormValue("without-upkeep") != ""
	actions, err := p.o.actions(v.Context(), LogFilter{listed, without})
	p.render(v, "log", "What operators did", struct {
		Jobs          []jobState
		Actions       []Action
		WithoutUpkeep bool
	}{p.jobs.list(), actions, without}, err)
}

func (p *Page) showJob(v visit) {
	if j := p.jobOf(v); j != nil {
		s := j.snapshot()
		p.render(v, "job", "A change", s, nil)
	}
}

func (p *Page) progress(v visit) {
	if j := p.jobOf(v); j != nil {
		p.stream(v, progressEvery, func() (string, bool) {
			s := j.snapshot()
			return p.fragment("job", "progress", s), !s.Running()
		})
	}
}

// jobOf is the job that a request names; where there is none, it is answered.
func (p *Page) jobOf(v visit) *job {
	id, err := strconv.Atoi(v.FormValue("id"))
	if j := p.jobs.find(id); err == nil && j != nil {
		return j
	}
	p.fail(v.w, http.StatusNotFound, "This process knows no such change; see the log.")
	return nil
}

// limitsView is what the callers of a key have left.
type limitsView struct {
	Key    string
	States []limitState
	Done   bool // they were just reset
}

func (p *Page) showLimits(v visit) {
	key := v.FormValue("key")
	data := limitsView{Key: key, Done: v.FormValue("done") != ""}
	var err error
	if key != "" {
		ctx, cancel := context.WithTimeout(v.Context(), readTimeout)
		defer cancel()
		data.States, err = p.o.limitStates(ctx, "", key)
	}
	p.render(v, "limits", "Rate limits", data, err)
}
