package page

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/internal/core"
	"github.com/holdfast-go/holdfast/outbox"
)

// part is what a change is about in one place.
type part struct {
	place core.Place
	s     core.Filter
}

// plan is a change that was asked for and is not begun.
type plan struct {
	query
	What   string // "retry" or "drop"
	Rate   string // as it was typed
	Force  bool
	Reason string
	// Edited is the body of the one message that is retried, as it was typed, and Patch one for all.
	Edited *string
	Patch  string
	change core.Change
}

// parsePlan reads what a form asks for.
func (p *Page) parsePlan(v visit) (plan, error) {
	if err := v.ParseForm(); err != nil {
		return plan{}, errors.New("the form cannot be read")
	}
	if v.Form.Get("matching") != "" {
		v.Form.Del("id") // what is marked is not asked for
	}
	v.Form.Del("after") // a page of a list is no choice
	q, err := p.parseQuery(v.Form, "")
	if err != nil {
		return plan{}, err
	}
	l := plan{query: q, What: v.Form.Get("what"), Rate: v.Form.Get("rate"), Force: v.Form.Get("force") != "", Reason: v.Form.Get("reason")}
	if v.Form.Get("chosen") != "" && q.ids == nil {
		return l, errors.New("no message is marked")
	}
	if l.What != "retry" && l.What != "drop" {
		return l, fmt.Errorf("%.40q is neither retry nor drop", l.What)
	}
	l.change = core.Change{By: v.access.By, Reason: l.Reason, Force: l.Force}
	if err := p.parseEdit(v, &l); err != nil {
		return l, err
	}
	if l.Rate != "" {
		if l.change.PerSecond, err = strconv.ParseFloat(l.Rate, 64); err != nil {
			return l, fmt.Errorf("%.40q is no number of messages a second", l.Rate)
		}
	}
	return l, core.Validate(l.change)
}

// parseEdit reads what becomes of bodies.
func (p *Page) parseEdit(v visit, l *plan) error {
	var e core.Edit
	if v.Form.Has("edited") {
		text := unixLines(v.Form.Get("edited"))
		l.Edited, e.Body = &text, compact([]byte(text))
	}
	l.Patch = unixLines(v.Form.Get("patch"))
	e.Patch = l.Patch
	switch {
	case e.None():
		return nil
	case !v.access.Bodies:
		return errors.New("you may not see bodies, and so not edit them")
	case l.What != "retry":
		return errors.New("a message that is dropped cannot be edited")
	case e.Body != nil && len(l.ids) != 1:
		return errors.New("one message alone gets a body")
	}
	l.change.Edit = e.Function(core.MayEdit(p.cfg.Mask))
	return e.Validate()
}

// unixLines undoes what forms do to the ends of lines.
func unixLines(text string) string { return strings.ReplaceAll(text, "\r\n", "\n") }

// compact undoes what the page does to JSON for the eye.
func compact(body []byte) []byte {
	var short bytes.Buffer
	if json.Compact(&short, body) != nil {
		return body
	}
	return append([]byte{}, short.Bytes()...)
}

// previewed is what a change would do in one place.
type previewed struct {
	From string
	core.Replayed
	Error string
}

// previewView is what is shown before a change begins.
type previewView struct {
	plan
	Parts           []previewed
	Count, Outlived int
	Fields          url.Values // of the form that begins it
	Chosen          bool
	// Sample is the first body as it would be, where bodies are edited.
	Sample *string
}

// settleTimes has the form that begins the change choose what its preview counted: times that are relative would move
// on until then, and what fails from now on was not looked at.
func (l *plan) settleTimes(now time.Time) {
	if l.ids != nil {
		return
	}
	if l.s.FailedBefore.IsZero() || l.s.FailedBefore.After(now) {
		l.s.FailedBefore = now.UTC().Truncate(time.Microsecond)
	}
	l.Values.Set("until", l.s.FailedBefore.UTC().Format(time.RFC3339Nano))
	if !l.s.FailedAfter.IsZero() {
		l.Values.Set("since", l.s.FailedAfter.UTC().Format(time.RFC3339Nano))
	}
}

// preview shows what a change would do, and asks for why.
func (p *Page) preview(v visit) {
	l, err := p.parsePlan(v)
	if err != nil {
		p.fail(v.w, http.StatusBadRequest, core.OneLine(err))
		return
	}
	l.settleTimes(time.Now())
	ctx, cancel := context.WithTimeout(v.Context(), core.ReadTimeout)
	defer cancel()
	shown := previewView{plan: l, Fields: l.Values, Chosen: l.ids != nil}
	if edit := l.change.Edit; edit != nil {
		l.change.Edit = func(m operator.MaskedMessage) ([]byte, error) {
			body, err := edit(m)
			if shown.Sample == nil && err == nil {
				shown.Sample = readable(body)
			}
			return body, err
		}
	}
	for _, at := range l.places {
		r, err := p.previewAt(ctx, l, at)
		shown.Parts = append(shown.Parts, previewed{at.Name, r, core.TextOf(err)})
		shown.Count, shown.Outlived = shown.Count+r.Returned, shown.Outlived+r.Outlived
	}
	p.render(v, "preview", "Before it begins", shown, nil)
}

func (p *Page) previewAt(ctx context.Context, l plan, at core.Place) (core.Replayed, error) {
	c := l.change
	c.DryRun = true
	r, err := p.o.Apply(ctx, l.What, at, l.at(at), c)
	switch {
	case r.Failed == 0 && errors.Is(err, inbox.ErrHeld):
		err = core.ErrPart
	case r.Failed == 0 && errors.Is(err, outbox.ErrOutlived):
		err = nil // they are counted
	}
	return r, err
}

// apply begins a change and leads to its progress.
func (p *Page) apply(v visit) {
	l, err := p.parsePlan(v)
	if err != nil {
		p.fail(v.w, http.StatusBadRequest, core.OneLine(err))
		return
	}
	total, _ := strconv.Atoi(v.Form.Get("count")) // for the bar alone
	state := jobState{What: l.What, Edited: l.change.Edit != nil, By: l.change.By, Reason: l.change.Reason, Total: max(0, total)}
	var parts []part
	for _, at := range l.places {
		parts = append(parts, part{at, l.at(at)})
		state.Parts = append(state.Parts, jobPart{From: at.Name, Chosen: core.Flags(l.at(at))})
	}
	id, err := p.jobs.begin(state, func(ctx context.Context, j *job) { p.changeParts(ctx, j, l.What, parts, l.change) })
	if err != nil {
		code := http.StatusTooManyRequests
		if errors.Is(err, errEnding) {
			code = http.StatusServiceUnavailable
		}
		p.fail(v.w, code, core.OneLine(err))
		return
	}
	seeOther(v, "job?id="+strconv.Itoa(id))
}

// changeParts does what a job is about, one place after the other. What one place refuses does not keep
// the others from it.
func (p *Page) changeParts(ctx context.Context, j *job, what string, parts []part, c core.Change) {
	for i, at := range parts {
		if ctx.Err() != nil {
			j.update(func(s *jobState) { s.Parts[i].Error = "not begun" })
			continue
		}
		c.Progress = func(r core.Replayed) { j.update(func(s *jobState) { s.Parts[i].Done = r.Returned + r.Failed }) }
		r, err := p.o.Apply(ctx, what, at.place, at.s, c)
		j.update(func(s *jobState) {
			s.Parts[i].Done = max(s.Parts[i].Done, r.Returned)
			s.Parts[i].Result = &core.Changed{From: at.place.Name, Count: r.Returned, Outlived: r.Outlived, Failed: r.Failed}
			s.Parts[i].Error = core.TextOf(err)
		})
	}
}

// stop ends a change that runs. What it has done stays done.
func (p *Page) stop(v visit) {
	if j := p.jobOf(v); j != nil {
		j.stop(v.access.By)
		seeOther(v, "job?id="+strconv.Itoa(j.snapshot().ID))
	}
}

// reset forgets what the caller of a key has used.
func (p *Page) reset(v visit) {
	key := v.PostFormValue("key")
	c := core.Change{By: v.access.By, Reason: v.PostFormValue("reason")}
	if err := core.Validate(c); err != nil || key == "" {
		p.fail(v.w, http.StatusBadRequest, "Say the key, and a reason of at most 1,000 bytes.")
		return
	}
	ctx, cancel := context.WithTimeout(v.Context(), core.ReadTimeout)
	defer cancel()
	if _, err := p.o.ResetLimits(ctx, "", key, c); err != nil {
		p.fail(v.w, http.StatusBadGateway, core.OneLine(err))
		return
	}
	seeOther(v, "limits?done=1&key="+url.QueryEscape(key))
}

// pause pauses or resumes a part.
func (p *Page) pause(v visit) {
	what := v.PostFormValue("what")
	part, err := p.o.PausableNamed(v.PostFormValue("part"))
	c := core.Change{By: v.access.By, Reason: v.PostFormValue("reason")}
	if what != core.Pausing && what != core.Resuming {
		err = fmt.Errorf("%.40q is neither pause nor resume", what)
	}
	if err := errors.Join(err, core.Validate(c)); err != nil {
		p.fail(v.w, http.StatusBadRequest, core.OneLine(err))
		return
	}
	ctx, cancel := context.WithTimeout(v.Context(), core.ReadTimeout)
	defer cancel()
	if err := p.o.Turn(ctx, what, part, c); err != nil {
		p.fail(v.w, http.StatusBadGateway, core.OneLine(err))
		return
	}
	p.samples.forget()
	seeOther(v, "./")
}

// seeOther leads to another address of the page. It is relative, and so right below any prefix.
func seeOther(v visit, address string) {
	v.w.Header().Set("Location", address)
	v.w.WriteHeader(http.StatusSeeOther)
}

const (
	// maxRunning is how many changes that the page began may run at a time.
	maxRunning = 4
	// jobsKept is how many that have ended are still shown.
	jobsKept = 100
)

// errBusy is returned where maxRunning changes run.
var errBusy = errors.New("four changes are running: wait until one has ended")

// errEnding is returned while the page is closed.
var errEnding = errors.New("the process ends: nothing is begun any more")

// jobs are the changes that a page has begun in this process.
type jobs struct {
	mu      sync.Mutex
	last    int
	all     []*job    // the newest last
	ending  time.Time // until when it is waited for those that run; zero: more may begin
	running sync.WaitGroup
}

// job is a change, and how far it is.
type job struct {
	cancel context.CancelFunc

	mu    sync.Mutex
	state jobState
}

// jobState is what is shown of a job.
type jobState struct {
	ID           int
	What         string
	Edited       bool // with other bodies
	By, Reason   string
	Began, Ended time.Time
	// Stopped is who has asked for its end; empty while it goes on.
	Stopped string
	// Total is how many it is about, as the preview counted them.
	Total int
	Parts []jobPart
}

// jobPart is what a job does in one place.
type jobPart struct {
	From, Chosen string
	Done         int
	Result       *core.Changed // nil: it has not ended
	Error        string
}

// Running says that the job has not ended.
func (s jobState) Running() bool { return s.Ended.IsZero() }

// Done is how many dead letters it has come to.
func (s jobState) Done() int {
	done := 0
	for _, part := range s.Parts {
		done += part.Done
	}
	return min(done, s.Total)
}

// begin runs a job in the background, unless too many run. Its context ends with the page.
func (j *jobs) begin(state jobState, run func(context.Context, *job)) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if !j.ending.IsZero() {
		return 0, errEnding
	}
	running := 0
	for _, other := range j.all {
		if other.snapshot().Running() {
			running++
		}
	}
	if running >= maxRunning {
		return 0, errBusy
	}
	if len(j.all) >= jobsKept {
		oldest := slices.IndexFunc(j.all, func(other *job) bool { return !other.snapshot().Running() })
		j.all = slices.Concat(j.all[:oldest], j.all[oldest+1:]) // few run
	}
	j.last++
	state.ID, state.Began = j.last, time.Now()
	ctx, cancel := context.WithCancel(context.Background())
	started := &job{cancel: cancel, state: state}
	j.all = append(j.all, started)
	j.running.Go(func() {
		defer cancel()
		run(ctx, started)
		started.update(func(s *jobState) { s.Ended = time.Now() })
	})
	return state.ID, nil
}

// end has no more begin, cancels those that run, and waits until they have ended, or so much time has passed since it was
// called first.
func (j *jobs) end(within time.Duration) {
	j.mu.Lock()
	if j.ending.IsZero() {
		j.ending = time.Now().Add(within)
	}
	left := time.Until(j.ending)
	for _, one := range j.all {
		one.cancel()
	}
	j.mu.Unlock()
	ended := make(chan struct{})
	go func() {
		j.running.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(left):
	}
}

// stop ends a job after what it is at.
func (j *job) stop(by string) {
	j.update(func(s *jobState) {
		if s.Running() && s.Stopped == "" {
			s.Stopped = by
		}
	})
	j.cancel()
}

// find returns a job that is still known, or nil.
func (j *jobs) find(id int) *job {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, one := range j.all {
		if one.snapshot().ID == id {
			return one
		}
	}
	return nil
}

// list returns the newest first.
func (j *jobs) list() []jobState {
	j.mu.Lock()
	defer j.mu.Unlock()
	var all []jobState
	for i := len(j.all) - 1; i >= 0; i-- {
		all = append(all, j.all[i].snapshot())
	}
	return all
}

func (j *job) update(change func(*jobState)) {
	j.mu.Lock()
	defer j.mu.Unlock()
	change(&j.state)
}

// snapshot is a copy: the parts change while it is shown.
func (j *job) snapshot() jobState {
	j.mu.Lock()
	defer j.mu.Unlock()
	s := j.state
	s.Parts = append([]jobPart(nil), s.Parts...)
	return s
}
