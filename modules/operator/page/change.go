package page

import (
	"bytes"
	"cmp"
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

// part is one place of a change, with its selection.
type part struct {
	place core.Place
	s     core.Filter
}

// plan is a change that was requested and has not started.
type plan struct {
	query
	What   string // "retry", "drop" or "postpone"
	Rate   string // as typed
	Delay  string // of postpone, as typed
	Force  bool
	Reason string
	// Edited is the new body of the one retried message, as typed. Patch is a merge patch for all.
	Edited *string
	Patch  string
	change core.Change
}

// parsePlan parses the form of a change.
func (p *Page) parsePlan(v visit) (plan, error) {
	if err := v.ParseForm(); err != nil {
		return plan{}, errors.New("the form cannot be read")
	}
	if v.Form.Get("matching") != "" {
		v.Form.Del("id") // marks do not count
	}
	v.Form.Del("after") // the cursor of a list chooses nothing
	q, err := p.parseQuery(v.Form, "")
	if err != nil {
		return plan{}, err
	}
	l := plan{query: q, What: v.Form.Get("what"), Rate: v.Form.Get("rate"), Force: v.Form.Get("force") != "", Reason: v.Form.Get("reason")}
	if v.Form.Get("chosen") != "" && q.ids == nil {
		return l, errors.New("no message is marked")
	}
	if core.Done(l.What) == "" || l.What == core.Postponing && !q.retrying() {
		return l, fmt.Errorf("%.40q is no change of these messages", l.What)
	}
	l.change = core.Change{By: v.access.By, Reason: l.Reason, Force: l.Force}
	if l.What == core.Postponing {
		l.Delay = cmp.Or(v.Form.Get("delay"), defaultDelay)
		if l.change.Delay, err = time.ParseDuration(l.Delay); err != nil || l.change.Delay <= 0 {
			return l, fmt.Errorf("%.40q is no time such as 30m", l.Delay)
		}
	}
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

// defaultDelay is the delay of postpone before somebody has typed one.
const defaultDelay = "30m"

// parseEdit parses the edit of bodies.
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
		return errors.New("you may not see bodies, so you may not edit them")
	case l.What != "retry" || l.retrying():
		return errors.New("only dead letters that are sent again can be edited")
	case e.Body != nil && len(l.ids) != 1:
		return errors.New("a new body needs exactly one message")
	}
	l.change.Edit = e.Function(core.MayEdit(p.cfg.Mask))
	return e.Validate()
}

// unixLines undoes the change of line ends by forms.
func unixLines(text string) string { return strings.ReplaceAll(text, "\r\n", "\n") }

// compact undoes the indentation of JSON on the page.
func compact(body []byte) []byte {
	var short bytes.Buffer
	if json.Compact(&short, body) != nil {
		return body
	}
	return append([]byte{}, short.Bytes()...)
}

// previewed is the effect of a change in one place.
type previewed struct {
	From string
	core.Replayed
	Error string
}

// previewView is shown before a change starts.
type previewView struct {
	plan
	Parts           []previewed
	Count, Outlived int
	Fields          url.Values // of the form that starts it
	Chosen          bool
	// Sample is the first new body, if bodies are edited.
	Sample *string
	progress
}

// settleTimes fixes the times of the selection, so that the change affects what its preview counted. Relative times would
// move on until then, and later failures were not in the preview. An outbox has no times of messages that wait.
func (l *plan) settleTimes(now time.Time) {
	if l.ids != nil || l.retrying() {
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

// preview shows the effect of a change, and asks for a reason.
func (p *Page) preview(v visit) {
	l, err := p.parsePlan(v)
	if err != nil {
		p.fail(v.w, http.StatusBadRequest, core.OneLine(err))
		return
	}
	l.settleTimes(p.known.until(time.Now()))
	if v.Method == http.MethodPost { // it cannot be reloaded
		ctx, cancel := context.WithTimeout(v.Context(), core.ReadTimeout)
		defer cancel()
		p.render(v, "preview", "Preview", p.previewOf(ctx, l, func(any) {}), nil)
		return
	}
	read := p.read(v, "preview", func(ctx context.Context, soFar func(any)) (any, bool, error) {
		return p.previewOf(ctx, l, soFar), false, nil
	})
	shown, _ := read.found.(previewView)
	if read.found == nil {
		shown = previewView{plan: l, Fields: l.Values, Chosen: l.ids != nil}
	}
	shown.progress = read.progress("preview?" + v.Form.Encode())
	p.render(v, "preview", "Preview", shown, read.err)
}

// previewOf counts the effect of a change. It calls soFar with the counts up to then.
func (p *Page) previewOf(ctx context.Context, l plan, soFar func(any)) previewView {
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
		l.change.Progress = func(r core.Replayed) { soFar(shown.with(previewed{at.Name, r, ""})) }
		r, err := p.previewAt(ctx, l, at)
		shown = shown.with(previewed{at.Name, r, core.TextOf(err)})
	}
	return shown
}

// with adds the counts of one place.
func (v previewView) with(one previewed) previewView {
	v.Parts = append(slices.Clone(v.Parts), one)
	v.Count, v.Outlived = v.Count+one.Returned, v.Outlived+one.Outlived
	return v
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

// apply starts a change and redirects to its progress.
func (p *Page) apply(v visit) {
	l, err := p.parsePlan(v)
	if err != nil {
		p.fail(v.w, http.StatusBadRequest, core.OneLine(err))
		return
	}
	total, _ := strconv.Atoi(v.Form.Get("count")) // only for the progress bar
	state := jobState{What: l.What, Edited: l.change.Edit != nil, Retrying: l.retrying(), By: l.change.By, Reason: l.change.Reason, Total: max(0, total)}
	var parts []part
	for _, at := range l.places {
		parts = append(parts, part{at, l.at(at)})
		state.Parts = append(state.Parts, jobPart{From: at.Name, Chosen: core.Flags(l.at(at))})
	}
	id, err := p.jobs.begin(state, func(ctx context.Context, j *job) {
		defer p.reads.stop() // their results are old
		p.changeParts(ctx, j, l.What, parts, l.change)
	})
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

// changeParts runs a job, one place after the other. It continues after a place that fails.
func (p *Page) changeParts(ctx context.Context, j *job, what string, parts []part, c core.Change) {
	for i, at := range parts {
		if ctx.Err() != nil {
			j.update(func(s *jobState) { s.Parts[i].Error = "not started" })
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

// stop stops a running change. Changed dead letters stay changed.
func (p *Page) stop(v visit) {
	if j := p.jobOf(v); j != nil {
		j.stop(v.access.By)
		seeOther(v, "job?id="+strconv.Itoa(j.snapshot().ID))
	}
}

// reset resets the limits of a caller.
func (p *Page) reset(v visit) {
	key := v.PostFormValue("key")
	c := core.Change{By: v.access.By, Reason: v.PostFormValue("reason")}
	if err := core.Validate(c); err != nil || key == "" {
		p.fail(v.w, http.StatusBadRequest, "A key is required. The reason has at most 1,000 bytes.")
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

// seeOther redirects to another address of the page. The address is relative, so it works below any prefix.
func seeOther(v visit, address string) {
	v.w.Header().Set("Location", address)
	v.w.WriteHeader(http.StatusSeeOther)
}

const (
	// maxRunning bounds the running changes of a page.
	maxRunning = 4
	// jobsKept bounds the jobs that are still shown.
	jobsKept = 100
)

// errBusy is returned if maxRunning changes are running.
var errBusy = errors.New("four changes are running: wait until one has ended")

// errEnding is returned after Close.
var errEnding = errors.New("shutting down; not accepting requests")

// jobs are the changes that a page has started in this process.
type jobs struct {
	mu      sync.Mutex
	last    int
	all     []*job    // the newest last
	ending  time.Time // until when Close waits; zero: not closed
	running sync.WaitGroup
}

// job is a change and its progress.
type job struct {
	cancel context.CancelFunc

	mu    sync.Mutex
	state jobState
}

// jobState is the visible state of a job.
type jobState struct {
	ID           int
	What         string
	Edited       bool // with edited bodies
	Retrying     bool // the messages wait for an attempt
	By, Reason   string
	Began, Ended time.Time
	// Stopped is who stopped it; empty: nobody.
	Stopped string
	// Total is the number of messages in the preview.
	Total int
	Parts []jobPart
}

// jobPart is the progress in one place.
type jobPart struct {
	From, Chosen string
	Done         int
	Result       *core.Changed // nil: not ended
	Error        string
}

// Running reports whether the job has not ended.
func (s jobState) Running() bool { return s.Ended.IsZero() }

// Done returns the number of messages that the job has handled.
func (s jobState) Done() int {
	done := 0
	for _, part := range s.Parts {
		done += part.Done
	}
	return min(done, s.Total)
}

// begin starts a job in the background, unless too many are running. Closing the page cancels its context.
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
		j.all = slices.Concat(j.all[:oldest], j.all[oldest+1:]) // at most maxRunning run
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

// end rejects new jobs, cancels the running ones, and waits until they have ended, or until within has passed since its
// first call.
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

// stop cancels a job. Its current step ends first.
func (j *job) stop(by string) {
	j.update(func(s *jobState) {
		if s.Running() && s.Stopped == "" {
			s.Stopped = by
		}
	})
	j.cancel()
}

// find returns the job with that id, or nil.
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

// list returns the jobs, the newest first.
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

// snapshot returns a copy, because the parts change while it is shown.
func (j *job) snapshot() jobState {
	j.mu.Lock()
	defer j.mu.Unlock()
	s := j.state
	s.Parts = append([]jobPart(nil), s.Parts...)
	return s
}
