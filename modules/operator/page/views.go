package page

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"html/template"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/internal/core"
	"github.com/holdfast-go/holdfast/outbox"
)

func (p *Page) showStatus(v visit) {
	p.render(v, "status", "Status", p.statusOf(v), nil)
}

// statusView is the state of all parts, with a chart.
type statusView struct {
	core.Status
	Chart  *chart // nil: the service keeps no history
	Stream template.URL
}

func (p *Page) statusOf(v visit) statusView {
	s := p.samples.sample(v.Context())
	shown := statusView{Status: s, Chart: p.newChart(s, work, v, query{}), Stream: "live"}
	if shown.Chart != nil {
		shown.Stream += "?" + shown.Chart.Address(shown.Chart.Part, shown.Chart.Span.Name)
	}
	return shown
}

// asked is a view of the results of a query.
type asked struct {
	View   string // its address
	Query  query
	Places []string // all that can be chosen
	// Names and Classes are known values for the filter.
	Names, Classes []string
	Found          any
	// More is true if there may be more results.
	More bool
	// Next is the cursor of the next page. Only the list of a single outbox has one.
	Next string
	// First is true for the first page.
	First bool
	// Part is true if not all could be seen.
	Part bool
	// Unlisted are the parts that cannot list messages that wait for an attempt.
	Unlisted []string
	progress
	// Chart is nil without a history.
	Chart *chart
}

// ask answers with the results of a request's query. The query is not changed after it was parsed, because find may run longer.
func (p *Page) ask(v visit, name, heading, kind string, find func(ctx context.Context, q query, soFar func(any)) (any, bool, error)) {
	if err := v.ParseForm(); err != nil {
		p.fail(v.w, http.StatusBadRequest, "The address cannot be read.")
		return
	}
	if name == "retrying" {
		v.Form.Set(name, "1")
	}
	q, err := p.parseQuery(v.Form, kind)
	if err != nil {
		p.fail(v.w, http.StatusBadRequest, core.OneLine(err))
		return
	}
	read := p.read(v, name, func(ctx context.Context, soFar func(any)) (any, bool, error) { return find(ctx, q, soFar) })
	if refused, ok := errors.AsType[refusal](read.err); ok {
		p.fail(v.w, refused.code, refused.text)
		return
	}
	p.known.note(read.found)
	names, classes := p.known.lists()
	shown := asked{
		View: name, Query: q, Places: p.o.PlaceNames(kind), Names: names, Classes: classes, Found: read.found, More: read.more, First: q.s.After == "",
		Part: read.err != nil, progress: read.progress(name + "?" + v.Form.Encode()),
	}
	if read.more && len(q.places) == 1 {
		shown.Next = lastCursor(read.found)
	}
	if q.Get("from") == "" && q.retrying() {
		shown.Unlisted = p.o.Unlisted()
	}
	if what, ok := charted[name]; ok {
		shown.Chart = p.newChart(p.samples.sample(v.Context()), what, v, q)
	}
	if shown.Reading && read.found == nil {
		name = "reading"
	}
	p.render(v, name, heading, shown, read.err)
}

// read returns the results of a view so far. It reads them unless another request for the view has.
func (p *Page) read(v visit, view string, find finder) results {
	again := v.Form.Has("again")
	v.Form.Del("again")
	return p.reads.results(v.Context(), fmt.Sprintf("%s?%s&bodies=%v", view, v.Form.Encode(), v.access.Bodies), again, find)
}

// charted are the figures of the views with a chart.
var charted = map[string]figure{"groups": dead, "dead-letters": dead, "retrying": waiting, "waiting": waiting}

// Filtered reports whether the query has a field of the filter besides the part, which the filter names while it is folded.
func (a asked) Filtered() bool {
	for field := range a.Query.Values {
		if !slices.Contains([]string{"from", "limit", "after", "retrying"}, field) {
			return true
		}
	}
	return false
}

// Several reports whether there is an outbox among several places: its list alone would have a next page.
func (a asked) Several() bool {
	return len(a.Query.places) > 1 && slices.ContainsFunc(a.Query.places, func(p core.Place) bool { return p.Kind == core.KindOutbox })
}

// lastCursor returns the cursor of the last message; empty: there is none.
func lastCursor(found any) string {
	messages, _ := found.([]core.Message)
	if len(messages) == 0 {
		return ""
	}
	return messages[len(messages)-1].Cursor
}

// refusal is an error that is the whole answer.
type refusal struct {
	code int
	text string
}

func (r refusal) Error() string { return r.text }

func (p *Page) showGroups(v visit) {
	_ = v.ParseForm()   // ask reports its error
	v.Form.Del("after") // the cursor of a list chooses nothing
	p.ask(v, "groups", "Dead letters by kind", "", func(ctx context.Context, q query, soFar func(any)) (any, bool, error) {
		sorted := func(all []core.Group) []core.Group {
			core.SortGroups(all)
			return all
		}
		all, err := core.EachPlaceSoFar(ctx, q.places, func(all []core.Group) { soFar(sorted(all)) },
			func(ctx context.Context, at core.Place, soFar func([]core.Group)) ([]core.Group, error) {
				return at.GroupsSoFar(ctx, q.s, soFar)
			})
		return sorted(all), false, err
	})
}

func (p *Page) showDeadLetters(v visit) {
	p.ask(v, "dead-letters", "Dead letters", "", func(ctx context.Context, q query, soFar func(any)) (any, bool, error) {
		q.s.Limit = cmp.Or(q.s.Limit, core.Listed)
		first := func(all []core.Message) []core.Message {
			if len(q.places) > 1 { // the list of one place keeps its order, for the cursor
				slices.SortStableFunc(all, func(a, b core.Message) int { return a.FailedAt.Compare(b.FailedAt) })
			}
			return all[:min(len(all), q.s.Limit)]
		}
		all, err := core.EachPlaceSoFar(ctx, q.places, func(all []core.Message) { soFar(first(all)) },
			func(ctx context.Context, at core.Place, soFar func([]core.Message)) ([]core.Message, error) {
				return at.ListSoFar(ctx, q.at(at), soFar)
			})
		return first(all), len(all) >= q.s.Limit, err
	})
}

// showRetrying lists messages that wait for an attempt, the one due first at the start.
func (p *Page) showRetrying(v visit) {
	p.ask(v, "retrying", "Retrying", "", func(ctx context.Context, q query, _ func(any)) (any, bool, error) {
		ctx, cancel := context.WithTimeout(ctx, core.ReadTimeout) // RabbitMQ delivers no message meanwhile
		defer cancel()
		q.s.Limit = cmp.Or(q.s.Limit, core.Listed)
		all, err := core.EachPlace(ctx, q.places, func(ctx context.Context, at core.Place) ([]core.Message, error) { return at.List(ctx, q.at(at), false) })
		slices.SortStableFunc(all, func(a, b core.Message) int { return a.DueAt.Compare(b.DueAt) })
		more := len(all) >= q.s.Limit
		return all[:min(len(all), q.s.Limit)], more, err
	})
}

func (p *Page) showWaiting(v visit) {
	p.ask(v, "waiting", "Waiting messages", core.KindOutbox, func(ctx context.Context, q query, _ func(any)) (any, bool, error) {
		f := outbox.WaitingFilter{Name: q.s.Name, Key: q.s.Key, Limit: cmp.Or(q.s.Limit, core.Listed), After: q.s.After}
		all, err := core.EachPlace(ctx, q.places, func(ctx context.Context, at core.Place) ([]core.Message, error) {
			return p.o.WaitingAt(ctx, at.Name, f)
		})
		return all, len(all) >= f.Limit, err
	})
}

// oneMessage is a dead letter with its context.
type oneMessage struct {
	core.Message
	Story core.Story
	// Body is the visible body; nil: it was not asked for.
	Body     *string
	Editable bool
	// Behind are the first messages of the same key that wait behind it. Parked is the number of all that wait for a consumer.
	Behind []core.Message
	Parked int
}

func (p *Page) showDeadLetter(v visit) {
	bodies := v.access.Bodies && v.FormValue("body") != ""
	heading := "Dead letter"
	if v.FormValue("retrying") != "" {
		heading = "Waiting message"
	}
	p.ask(v, "dead-letter", heading, "", func(ctx context.Context, q query, _ func(any)) (any, bool, error) {
		at, s, err := q.one()
		if err != nil {
			return nil, false, err
		}
		s.Limit = 1 // the rest of a queue is not read
		found, err := at.List(ctx, s, true)
		if err != nil {
			return nil, false, err
		}
		if len(found) == 0 {
			return nil, false, refusal{http.StatusNotFound, "There is no such " + q.noun() + ". It was retried or dropped."}
		}
		one := oneMessage{Message: found[0]}
		var failed error
		one.Story, failed = p.o.Story(ctx, core.Typed{IDs: []string{one.ID.String()}}, found)
		if bodies {
			p.uncover(&one)
		} else {
			one.Headers = nil
		}
		one.Behind, one.Parked, err = p.o.Behind(ctx, at, one.Message)
		return one, false, errors.Join(err, failed)
	})
}

// storyView is a message that somebody looks up.
type storyView struct {
	ID    string // as typed
	Story *core.Story
	Hint  string
}

func (p *Page) showStory(v visit) {
	data := storyView{ID: strings.TrimSpace(v.FormValue("id")), Hint: core.UnknownHint}
	if data.ID == "" {
		p.render(v, "story", "Message", data, nil)
		return
	}
	ctx, cancel := context.WithTimeout(v.Context(), core.ReadTimeout)
	defer cancel()
	story, err := p.o.Story(ctx, core.Typed{IDs: []string{data.ID}}, nil)
	if _, mistyped := errors.AsType[*core.Mistake](err); mistyped {
		p.fail(v.w, http.StatusBadRequest, core.OneLine(err))
		return
	}
	if err == nil {
		data.Story = &story
	}
	p.render(v, "story", "Message", data, err)
}

// uncover adds the body, as far as the mask shows it.
func (p *Page) uncover(one *oneMessage) {
	body := one.Bytes()
	shown := one.Masked(p.cfg.Mask)
	// Forms change all line ends except \n, and no page can contain a NUL.
	one.Editable = bytes.Equal(shown, body) && utf8.Valid(body) && !bytes.ContainsAny(body, "\r\x00") && len(body) <= core.MaxEdit
	if shown == nil {
		hidden := core.HiddenByService
		one.Body = &hidden
		return
	}
	one.Body = readable(shown)
}

// readable formats a body for reading. The result is not much longer than the body, whatever it contains.
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
		text = fmt.Sprintf("%s\n… the first %d bytes; the command `show` prints all %d", strings.ToValidUTF8(text[:maxShown], ""), maxShown, len(body))
	}
	return &text
}

// maxShown bounds a shown body, in bytes. A body that may be edited is shown whole.
const maxShown = core.MaxEdit

// nestsDeep reports whether JSON may nest so deeply that its indents are longer than the rest.
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

func (p *Page) showLog(v visit) {
	without := v.FormValue("without-upkeep") != ""
	actions, err := p.o.Actions(v.Context(), operator.LogFilter{Limit: core.Listed, WithoutUpkeep: without})
	p.render(v, "log", "Log", struct {
		Jobs          []jobState
		Actions       []operator.Action
		WithoutUpkeep bool
	}{p.jobs.list(), actions, without}, err)
}

func (p *Page) showJob(v visit) {
	if j := p.jobOf(v); j != nil {
		s := j.snapshot()
		p.render(v, "job", "Change", s, nil)
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

// jobOf returns the job that a request names. If there is none, it answers the request and returns nil.
func (p *Page) jobOf(v visit) *job {
	id, err := strconv.Atoi(v.FormValue("id"))
	if j := p.jobs.find(id); err == nil && j != nil {
		return j
	}
	p.fail(v.w, http.StatusNotFound, "This process has no such change. See the log.")
	return nil
}

// runningView has the processes of the service, and the leases of its outboxes.
type runningView struct {
	core.Running
	Kept     bool // the service keeps a history
	Outboxes []core.OutboxStatus
}

// processesShown bounds the processes on the page, which every viewer receives every 2 s.
const processesShown = 100

// Shown are all processes, or the ones with the oldest messages in work, the oldest first.
func (r runningView) Shown() []core.Process {
	if len(r.Processes) <= processesShown {
		return r.Processes
	}
	busy := slices.DeleteFunc(slices.Clone(r.Processes), func(p core.Process) bool { return p.Gone || p.Oldest.IsZero() })
	slices.SortStableFunc(busy, func(a, b core.Process) int { return a.Oldest.Compare(b.Oldest) })
	others := slices.DeleteFunc(slices.Clone(r.Processes), func(p core.Process) bool { return !p.Gone && !p.Oldest.IsZero() })
	return append(busy, others...)[:processesShown]
}

func (p *Page) runningNow(v visit) (runningView, error) {
	running, err := p.o.Running(v.Context())
	shown := runningView{Running: running, Kept: true, Outboxes: p.samples.sample(v.Context()).Outboxes}
	if core.KeepsNone(err) {
		shown.Kept, err = false, nil
	}
	return shown, err
}

func (p *Page) showRunning(v visit) {
	if v.FormValue("live") != "" {
		p.stream(v, core.LiveEvery, func() (string, bool) {
			shown, err := p.runningNow(v)
			if err != nil {
				return p.fragment("running", "silentProcesses", core.TextOf(err)), false
			}
			return p.fragment("running", "processes", shown), false
		})
		return
	}
	shown, err := p.runningNow(v)
	p.render(v, "running", "Running", shown, err)
}

// limitsView has the limits of one caller.
type limitsView struct {
	None   bool // the service has no limits
	Key    string
	States []core.LimitState
	Done   bool // they were just reset
}

func (p *Page) showLimits(v visit) {
	key := v.FormValue("key")
	data := limitsView{None: true, Key: key, Done: v.FormValue("done") != ""}
	for _, l := range p.o.Config.Limiters {
		data.None = data.None && len(l.Limits) == 0
	}
	var err error
	if key != "" && !data.None {
		ctx, cancel := context.WithTimeout(v.Context(), core.ReadTimeout)
		defer cancel()
		data.States, err = p.o.LimitStates(ctx, "", key)
	}
	p.render(v, "limits", "Rate limits", data, err)
}

// query is the selection in the address or form of a request. The zero query chooses all.
type query struct {
	url.Values
	places []core.Place
	ids    map[string][]uuid.UUID // by place; nil: s chooses
	s      core.Filter
}

// fields are the fields of a query in forms and addresses.
var fields = []string{"from", "name", "key", "class", "group", "error", "since", "until", "limit", "retrying", "after", "id"}

// parseQuery parses a selection. kind limits the places to one kind. Empty: all.
func (p *Page) parseQuery(form url.Values, kind string) (q query, err error) {
	q.Values = url.Values{}
	for _, field := range fields {
		if values := slices.DeleteFunc(slices.Clone(form[field]), func(v string) bool { return v == "" }); len(values) > 0 {
			q.Values[field] = values
		}
	}
	typed := core.Typed{
		From: q.Values["from"], Name: q.Get("name"), Key: q.Get("key"), Class: q.Get("class"), Group: q.Get("group"), Error: q.Get("error"),
		Since: q.Get("since"), Until: q.Get("until"), Retrying: q.retrying(),
	}
	if text := q.Get("limit"); text != "" {
		if typed.Limit, err = strconv.Atoi(text); err != nil || typed.Limit < 1 || typed.Limit > core.MaxPerPage {
			return q, fmt.Errorf("limit must be from 1 to %d", core.MaxPerPage)
		}
	}
	if q.places, q.s, err = p.o.Choose(typed, kind); err != nil {
		return q, err
	}
	q.s.After = q.Get("after")
	return q, q.parseIDs()
}

// retrying reports whether the query is about messages that wait for an attempt.
func (q query) retrying() bool { return q.Get("retrying") != "" }

// noun returns the name of the chosen messages.
func (q query) noun() string { return core.Typed{Retrying: q.retrying()}.Noun() }

// parseIDs parses the marked messages: the place and the id of each.
func (q *query) parseIDs() error {
	marked := q.Values["id"]
	if len(marked) > core.MaxPerPage {
		return fmt.Errorf("at most %d messages at a time", core.MaxPerPage)
	}
	for _, text := range marked {
		from, id, _ := strings.Cut(text, "/")
		parsed, err := uuid.Parse(id)
		if err != nil || !slices.ContainsFunc(q.places, func(p core.Place) bool { return p.Name == from }) {
			return fmt.Errorf("%.80q is not a message of the chosen parts", text)
		}
		if q.ids == nil {
			q.ids = map[string][]uuid.UUID{}
		}
		q.ids[from] = append(q.ids[from], parsed)
	}
	if q.ids != nil {
		q.places = slices.DeleteFunc(q.places, func(p core.Place) bool { return q.ids[p.Name] == nil })
	}
	return nil
}

// at returns the selection in one place.
func (q query) at(p core.Place) core.Filter {
	if q.ids != nil {
		return core.Filter{IDs: q.ids[p.Name]}
	}
	return q.s
}

// one returns the single dead letter of a request.
func (q query) one() (core.Place, core.Filter, error) {
	if len(q.places) != 1 || len(q.Values["id"]) != 1 {
		return core.Place{}, core.Filter{}, refusal{http.StatusBadRequest, "Name one message, and its outbox or consumer."}
	}
	return q.places[0], q.at(q.places[0]), nil
}

// With returns the address of the same query with other values, given as field, value, field, value. An empty
// value removes the field.
func (q query) With(pairs ...string) template.URL {
	values := url.Values{}
	for field, v := range q.Values {
		values[field] = v
	}
	for i := 0; i+1 < len(pairs); i += 2 {
		values.Del(pairs[i])
		if pairs[i+1] != "" {
			values.Set(pairs[i], pairs[i+1])
		}
	}
	return template.URL(values.Encode()) // it is escaped
}

const (
	// progressEvery is the interval of progress events.
	progressEvery = 500 * time.Millisecond
	// streamTime bounds a stream. The browser then opens another, which is authorized again.
	streamTime = time.Minute
	// writeTimeout bounds each event, for a viewer who has vanished.
	writeTimeout = 10 * time.Second
)

// sampler reads the state of the parts at most once in LiveEvery, for all viewers together.
type sampler struct {
	read func(context.Context) core.Status
	mu   sync.Mutex
	last core.Status
	at   time.Time // when the last read ended
}

func (s *sampler) sample(ctx context.Context) core.Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.at) >= core.LiveEvery { // a read may take long: those who waited for it share it
		now := s.read(context.WithoutCancel(ctx)) // others wait for it, too
		now.AddRates(s.last)
		s.last, s.at = now, time.Now()
	}
	return s.last
}

// verdictAge is how long a verdict counts on views that do not read the state themselves.
const verdictAge = time.Minute

// verdict returns the last verdict, or nil if it is old. It does not wait for a read.
func (s *sampler) verdict() *core.Verdict {
	if !s.mu.TryLock() {
		return nil
	}
	defer s.mu.Unlock()
	if s.at.IsZero() || time.Since(s.at) > verdictAge {
		return nil
	}
	return &s.last.Verdict
}

// forget makes the next sample read again.
func (s *sampler) forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.at = time.Time{}
}

// live streams the state of all parts.
func (p *Page) live(v visit) {
	p.stream(v, core.LiveEvery, func() (string, bool) {
		return p.fragment("status", "state", p.statusOf(v)), false
	})
}

// stream sends server-sent events until the viewer leaves, the page is closed, or next returns
// the last one.
func (p *Page) stream(v visit, every time.Duration, next func() (html string, last bool)) {
	select {
	case p.streams <- struct{}{}:
		defer func() { <-p.streams }()
	default:
		p.fail(v.w, http.StatusServiceUnavailable, "Too many pages are live.")
		return
	}
	ctx, cancel := context.WithTimeout(v.Context(), streamTime)
	defer cancel()
	v.w.Header().Set("Content-Type", "text/event-stream")
	v.w.Header().Set("X-Accel-Buffering", "no")
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		html, last := next()
		if sendEvent(v, html, last) != nil || last {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-p.ended:
			return
		case <-tick.C:
		}
	}
}

// sendEvent sends one piece of the page. The last one is named end.
func sendEvent(v visit, html string, last bool) error {
	var event bytes.Buffer
	if last {
		event.WriteString("event: end\n")
	}
	for line := range strings.Lines(strings.ReplaceAll(html, "\r", " ")) { // it would end a line, too
		event.WriteString("data: " + strings.TrimRight(line, "\n") + "\n")
	}
	event.WriteString("\n")
	control := http.NewResponseController(v.w)
	_ = control.SetWriteDeadline(time.Now().Add(writeTimeout)) // if it is not supported, the server's own deadline counts
	if _, err := v.w.Write(event.Bytes()); err != nil {
		return err
	}
	return control.Flush()
}
