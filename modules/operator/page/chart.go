package page

import (
	"cmp"
	"fmt"
	"html/template"
	"slices"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/internal/core"
)

// span is a length of time that a chart shows, and the width of its bars.
type span struct {
	Name         string // in addresses
	Label        string
	length, step time.Duration
}

var (
	hour = span{"hour", "Hour", time.Hour, time.Minute}
	day  = span{"day", "Day", 24 * time.Hour, 15 * time.Minute}
)

// spanNamed returns the span of a request. Default: the hour.
func spanNamed(name string) span {
	if name == day.Name {
		return day
	}
	return hour
}

// bar has the figures of one part, or of several, in one step of a chart.
type bar struct {
	At                    time.Time
	Done, Failed, Retried int64
	Waiting, Dead         int
	Lag                   float64 // seconds
	Known                 bool    // somebody has recorded
	Partial               bool    // the step has not ended
	measured              bool    // the numbers of a part are known
	missing               bool    // those of another part are not
}

// figure is the number that a chart shows.
type figure struct {
	name  string
	label string
	of    func(bar) float64
}

var (
	work    = figure{"work", "Done", func(b bar) float64 { return float64(b.Done) }}
	dead    = figure{"dead", "Dead", func(b bar) float64 { return float64(b.Dead) }}
	waiting = figure{"waiting", "Waiting", func(b bar) float64 { return float64(b.Waiting) }}
)

// bars returns the figures of a part in the steps of a span before a time. An empty part is all parts: their counts are added up,
// and the largest lag counts.
func bars(h *core.History, part string, s span, end time.Time) []bar {
	figures := h.Hour
	if s == day {
		figures = h.Day
	}
	count := int(s.length / s.step)
	first := end.Add(-s.length)
	all := make([]bar, count)
	for i := range all {
		all[i].At = first.Add(time.Duration(i) * s.step)
	}
	gauges := map[string]bar{} // of the current step, by part
	last := -1
	for _, f := range figures {
		i := int(f.At.Sub(first) / s.step)
		if f.At.Before(first) || i >= count || part != "" && part != f.Part {
			continue
		}
		if i != last {
			clear(gauges)
			last = i
		}
		all[i].add(f, gauges)
	}
	return all
}

// Measured formats a measured number of a bar: – if it is unknown, with a + if a part is missing.
func (b bar) Measured(n int) string {
	switch {
	case !b.measured:
		return "–"
	case b.missing:
		return many(n) + "+"
	}
	return many(n)
}

// add adds one figure to a bar. gauges has the largest numbers of each part in the bar.
func (b *bar) add(f operator.Figures, gauges map[string]bar) {
	b.Known = true
	g, seen := gauges[f.Part]
	if !seen || f.Measured && !g.measured {
		g.measured = f.Measured
		gauges[f.Part] = g
		b.missing = false
		for _, g := range gauges {
			b.measured, b.missing = b.measured || g.measured, b.missing || !g.measured
		}
	}
	b.Done, b.Failed, b.Retried = b.Done+f.Done, b.Failed+f.Failed, b.Retried+f.Retried
	if !f.Measured {
		return
	}
	g.Waiting, g.Dead, g.Lag = max(g.Waiting, f.Waiting), max(g.Dead, f.Dead), max(g.Lag, f.Lag.Seconds())
	gauges[f.Part] = g
	b.Waiting, b.Dead, b.Lag = 0, 0, 0
	for _, g := range gauges {
		b.Waiting, b.Dead, b.Lag = b.Waiting+g.Waiting, b.Dead+g.Dead, max(b.Lag, g.Lag)
	}
}

// Title is the text that appears over a bar.
func (b bar) Title() string {
	if !b.Known {
		return b.Clock() + ": nothing recorded"
	}
	return fmt.Sprintf("%s: %s done, %s failed, %s waiting, %s dead", b.Clock(), many(int(b.Done)), many(int(b.Failed)), b.Measured(b.Waiting), b.Measured(b.Dead))
}

// Clock is the time of day, in UTC.
func (b bar) Clock() string { return b.At.UTC().Format("15:04") }

// Age is the lag for a column.
func (b bar) Age() string {
	if !b.measured {
		return "–"
	}
	return core.Lasting(b.Lag)
}

// chart is the data of one chart.
type chart struct {
	figure
	Span  span
	Spans []span
	Part  string // empty: all
	Parts []string
	Bars  []bar
	Error string
	base  query // of the view
}

// newChart returns the chart of a figure in a view with a query; nil: the service keeps no history. A view of one part shows its
// chart.
func (p *Page) newChart(s core.Status, what figure, v visit, q query) *chart {
	if s.History == nil {
		return nil
	}
	c := &chart{figure: what, Span: spanNamed(v.FormValue("span")), Spans: []span{hour, day}, Error: s.History.Error, base: q}
	for _, b := range s.Outboxes {
		c.Parts = append(c.Parts, b.Name)
	}
	for _, q := range s.Consumers {
		c.Parts = append(c.Parts, q.Name)
	}
	if chosen := cmp.Or(v.FormValue("part"), q.Get("from")); slices.Contains(c.Parts, chosen) {
		c.Part = chosen
	}
	c.Bars = bars(s.History, c.Part, c.Span, s.At.UTC().Truncate(c.Span.step).Add(c.Span.step))
	c.Bars[len(c.Bars)-1].Partial = true
	return c
}

// Heading is the label of the figure.
func (c chart) Heading() string { return c.label }

// Top is the largest value.
func (c chart) Top() string { return many(int(c.top())) }

func (c chart) top() float64 {
	most := 1.0
	for _, b := range c.drawn() {
		most = max(most, c.height(b))
	}
	return most
}

// drawn returns the bars of the picture. Counts of a step that has not ended would look like a drop.
func (c chart) drawn() []bar {
	if c.name == work.name {
		return c.Bars[:len(c.Bars)-1]
	}
	return c.Bars
}

// height is the whole height of a bar.
func (c chart) height(b bar) float64 {
	if c.name == work.name {
		return float64(b.Done + b.Failed)
	}
	return c.of(b)
}

// Ticks are the times below the chart.
func (c chart) Ticks() []string {
	const parts = 4
	var all []string
	for i := range parts {
		all = append(all, c.Bars[i*len(c.Bars)/parts].Clock())
	}
	if c.name == work.name {
		return append(all, c.Bars[len(c.Bars)-1].Clock())
	}
	return append(all, "now")
}

// Unit is the width of a bar.
func (c chart) Unit() string {
	if c.Span == hour {
		return "minute"
	}
	return core.Lasting(c.Span.step.Seconds())
}

// Scale describes the height of the chart.
func (c chart) Scale() string {
	if c.name == work.name {
		return c.Top() + " per " + c.Unit()
	}
	return c.Top()
}

// Newest returns the bars for the table, the newest first.
func (c chart) Newest() []bar {
	var all []bar
	for i := len(c.Bars) - 1; i >= 0; i-- {
		if c.Bars[i].Known {
			all = append(all, c.Bars[i])
		}
	}
	return all
}

const chartHeight = 100.0

// Picture is the chart. Each bar has a title, which a browser shows without scripts.
func (c chart) Picture() template.HTML {
	var svg strings.Builder
	fmt.Fprintf(&svg, `<svg class="chart" viewBox="0 0 %d %g" preserveAspectRatio="none" role="img" aria-label="%s, by %s. The table has the numbers.">`,
		len(c.drawn())*10, chartHeight, c.label, c.Unit())
	scale := chartHeight / c.top()
	for i, b := range c.drawn() {
		x := i * 10
		fmt.Fprintf(&svg, `<g><title>%s</title><rect class="under" x="%d" y="0" width="10" height="%g"/>`, b.Title(), x, chartHeight)
		y := chartHeight
		piece := func(class string, value float64) {
			if value <= 0 {
				return
			}
			height := max(1.5, value*scale)
			y -= height
			fmt.Fprintf(&svg, `<rect class="%s" x="%d" y="%.1f" width="8" height="%.1f"/>`, class, x+1, max(0, y), height)
		}
		if c.name == work.name {
			piece("done", float64(b.Done))
			piece("failed", float64(b.Failed))
		} else {
			piece(c.name, c.of(b))
		}
		svg.WriteString("</g>")
	}
	svg.WriteString("</svg>")
	return template.HTML(svg.String())
}

// spark is the small chart of a card: the work of a part in the last hour. It is empty without a history.
func spark(h *core.History, part string, end time.Time) template.HTML {
	if h == nil || len(h.Hour) == 0 {
		return ""
	}
	const height = 24.0
	all := bars(h, part, hour, end.UTC().Truncate(core.HourStep)) // the last step is not complete
	var busiest, failed int64
	for _, b := range all {
		busiest, failed = max(busiest, b.Done), failed+b.Failed
	}
	most := float64(max(1, busiest))
	var svg, line strings.Builder
	first := max(0, slices.IndexFunc(all, func(b bar) bool { return b.Known })) // nothing was recorded before
	for i, b := range all[first:] {
		fmt.Fprintf(&line, " %d,%.1f", (first+i)*4, height-1-(height-3)*float64(b.Done)/most)
	}
	label := fmt.Sprintf("Last hour: at most %s done a minute, %s failed", many(int(busiest)), many(int(failed)))
	fmt.Fprintf(&svg, `<svg class="spark" viewBox="0 0 %d %g" preserveAspectRatio="none" role="img" aria-label="%s"><title>%s</title>`, (len(all)-1)*4, height, label, label)
	fmt.Fprintf(&svg, `<polygon class="area" points="%d,%g%s %d,%g"/><polyline class="line" points="%s"/>`, first*4, height, line.String(), (len(all)-1)*4, height, line.String()[1:])
	for i, b := range all {
		if b.Failed > 0 {
			tall := min(height, max(3, (height-3)*float64(b.Failed)/most))
			fmt.Fprintf(&svg, `<rect class="failed" x="%d" y="%.1f" width="3" height="%.1f"/>`, max(0, i*4-1), height-tall, tall)
		}
	}
	svg.WriteString("</svg>")
	return template.HTML(svg.String())
}

// Address returns the address of the same chart with another part or span.
func (c chart) Address(part, length string) template.URL {
	return c.base.With("part", part, "span", strings.TrimPrefix(length, hour.Name))
}
