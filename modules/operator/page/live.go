package page

import (
	"bytes"
	"context"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/modules/operator/internal/core"
)

const (
	// progressEvery is how often the progress of a change is.
	progressEvery = 500 * time.Millisecond
	// streamTime is after how long a stream ends: the browser begins another, and is authorized anew.
	streamTime = time.Minute
	// writeTimeout bounds each event, for a viewer who has vanished.
	writeTimeout = 10 * time.Second
)

// sampler looks at the parts at most once in LiveEvery, however many look at the page.
type sampler struct {
	look func(context.Context) core.Status
	mu   sync.Mutex
	last core.Status
	at   time.Time // when the last look ended
}

func (s *sampler) sample(ctx context.Context) core.Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.at) >= core.LiveEvery { // a look may take long: those who have waited for it want no other
		now := s.look(context.WithoutCancel(ctx)) // the next in the line gets it, too
		now.AddRates(s.last)
		s.last, s.at = now, time.Now()
	}
	return s.last
}

// forget has the next look be a new one.
func (s *sampler) forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.at = time.Time{}
}

// live sends the state of everything again and again.
func (p *Page) live(v visit) {
	p.stream(v, core.LiveEvery, func() (string, bool) {
		return p.fragment("status", "state", p.samples.sample(v.Context())), false
	})
}

// stream sends server-sent events until the viewer leaves, the page is closed or next says that
// it was the last.
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
	for line := range strings.Lines(strings.ReplaceAll(html, "\r", " ")) { // which would end a line, too
		event.WriteString("data: " + strings.TrimRight(line, "\n") + "\n")
	}
	event.WriteString("\n")
	control := http.NewResponseController(v.w)
	_ = control.SetWriteDeadline(time.Now().Add(writeTimeout)) // where there is none, the server's own counts
	if _, err := v.w.Write(event.Bytes()); err != nil {
		return err
	}
	return control.Flush()
}
