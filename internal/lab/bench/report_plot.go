package main

import (
	"fmt"
	"html"
	"math"
	"strings"
)

// The sizes of a plot, in pixels.
const (
	plotWidth  = 900
	plotNames  = 380 // of the column with names
	plotBars   = 380 // of the longest bar
	plotLine   = 20  // of one bar
	plotBorder = 16
)

// plotStyle is readable on light and on dark pages.
const plotStyle = `<style>
text { font: 13px sans-serif; fill: #24292f }
.title { font-weight: bold }
.ours { fill: #1a7f37 } .peer { fill: #9a6700 } .raw { fill: #8c959f }
.ends { stroke: #24292f }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .ends { stroke: #e6edf3 } }
</style>
`

// plot draws the first column of each table of a workload: bars to the median, with a line from the least to
// the most.
func (r *report) plot(workload string) string {
	var b strings.Builder
	y := plotBorder
	for _, t := range r.Tables {
		if t.Workload == workload {
			y = t.plot(&b, y)
		}
	}
	return fmt.Sprintf("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"%s\">\n%s%s</svg>\n",
		plotWidth, y, html.EscapeString(workload), plotStyle, b.String())
}

// plot draws the table below y and returns where it ends.
func (t measured) plot(b *strings.Builder, y int) int {
	longest := 0.0
	for _, row := range t.Rows {
		if most := row.Figures[0].most; !math.IsNaN(most) {
			longest = max(longest, most)
		}
	}
	fmt.Fprintf(b, "<text class=\"title\" x=\"%d\" y=\"%d\">%s, %s</text>\n", plotBorder, y+14, html.EscapeString(t.Title), html.EscapeString(t.Columns[0]))
	y += plotLine
	for _, row := range t.Rows {
		row.plot(b, y, longest)
		y += plotLine
	}
	return y + plotBorder
}

func (c contestant) plot(b *strings.Builder, y int, longest float64) {
	figure := c.Figures[0]
	at := func(x float64) float64 { return plotNames + plotBars*x/longest }
	fmt.Fprintf(b, "<text x=\"%d\" y=\"%d\" text-anchor=\"end\">%s</text>\n", plotNames-8, y+14, html.EscapeString(c.Name))
	if longest == 0 || math.IsNaN(figure.median) {
		return
	}
	kind := "raw"
	switch {
	case beginsWith(c.Name, ourNames):
		kind = "ours"
	case beginsWith(c.Name, peerNames):
		kind = "peer"
	}
	fmt.Fprintf(b, "<rect class=\"%s\" x=\"%d\" y=\"%d\" width=\"%.1f\" height=\"%d\"/>\n", kind, plotNames, y+3, at(figure.median)-plotNames, plotLine-6)
	fmt.Fprintf(b, "<line class=\"ends\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%d\" y2=\"%d\"/>\n", at(figure.least), at(figure.most), y+plotLine/2, y+plotLine/2)
	fmt.Fprintf(b, "<text x=\"%.1f\" y=\"%d\">%s</text>\n", at(figure.most)+6, y+14, short(figure.median))
}
