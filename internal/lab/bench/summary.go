package main

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// headline is a row of the summary: a table of the report under a name that a reader understands at once.
type headline struct {
	title string // of the table
	name  string
	unit  string // for the reader
}

// headlines are the rows of the summary, in their order. The other tables stand further below in the report.
var headlines = []headline{
	{"outbox, 30000 messages of 512 bytes to a classic queue", "outbox to RabbitMQ, classic queue", "messages/s"},
	{"outbox, 30000 messages of 512 bytes to a quorum queue", "outbox to RabbitMQ, quorum queue", "messages/s"},
	{"outbox, latency from commit at 50 messages/s", "outbox, commit to confirm, 50 messages/s", "ms, p50"},
	{"outbox, latency from commit at 1000 messages/s", "outbox, commit to confirm, 1,000 messages/s", "ms, p50"},
	{"inbox, 1 handlers, 1500 messages of 512 bytes, classic queue", "inbox, 1 handler", "messages/s"},
	{"inbox, 8 handlers, 3750 messages of 512 bytes, classic queue", "inbox, 8 handlers", "messages/s"},
	{"inbox, batches, 30000 messages of 512 bytes, classic queue", "inbox, batches of 200", "messages/s"},
	{"txretry, one UPDATE by key, goroutines: 8", "txretry, 8 goroutines", "transactions/s"},
	{"expiry, 50000 due rows of 500000", "expiry", "rows/s"},
	{"idempotency without a gate, first run, clients: 8", "idempotency on Postgres, first request", "requests/s"},
	{"idempotency on redis, first run, clients: 50", "idempotency on Redis, first request", "requests/s"},
	{"idempotency on redis, replay, clients: 50", "idempotency on Redis, replay", "requests/s"},
	{"ratelimit in memory, 100000 keys", "ratelimit in memory", "ns/decision"},
	{"ratelimit on Redis, 50 goroutines", "ratelimit on Redis", "decisions/s"},
	{"nats, publish 30000 messages of 512 bytes", "publish to NATS JetStream", "messages/s"},
	{"nats, consume 30000 messages of 512 bytes", "consume from NATS JetStream", "messages/s"},
	{"whole shop in one process, clients: 50", "the whole ticket shop, 50 clients", "requests/s"},
}

func (r *report) table(title string) (measured, bool) {
	i := slices.IndexFunc(r.Tables, func(t measured) bool { return t.Title == title })
	if i < 0 {
		return measured{}, false
	}
	return r.Tables[i], true
}

// figure is the first figure of a contender.
func (t measured) figure(name string) float64 {
	for _, row := range t.Rows {
		if row.Name == name && len(row.Figures) > 0 {
			return row.Figures[0].median
		}
	}
	return math.NaN()
}

// summary is the table that a reader sees first.
func (r *report) summary(b *strings.Builder) {
	b.WriteString("| | unit | Holdfast | best peer | ratio | raw limit | ratio |\n|---|---|---|---|---|---|---|\n")
	for _, h := range headlines {
		t, ok := r.table(h.title)
		if !ok {
			continue
		}
		s := t.Summary
		fmt.Fprintf(b, "| %s | %s | %s | %s | %s | %s | %s |\n", h.name, h.unit, plain(t.figure(s.Ours)),
			t.named(s.Peer), plain(s.OverPeer.median), t.named(s.Raw), plain(s.OverRaw.median))
	}
}

// named is a contender's figure and name.
func (t measured) named(name string) string {
	if name == "" {
		return "-"
	}
	return plain(t.figure(name)) + ", " + name
}

// plain writes a figure with commas.
func plain(figure float64) string {
	if math.IsNaN(figure) {
		return "-"
	}
	text := short(figure)
	if figure < 1000 {
		return text
	}
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}

const (
	barLeft   = 330 // where bars begin
	barWidth  = 330 // of the longest
	barHeight = 16
)

// chart draws our figure and the best peer's as bars, the faster one of each pair with the full length.
func (r *report) chart() string {
	var bars strings.Builder
	y := 34
	for _, h := range headlines {
		t, ok := r.table(h.title)
		if !ok || t.Summary.Peer == "" {
			continue
		}
		ours, peer := t.figure(t.Summary.Ours), t.figure(t.Summary.Peer)
		a, b := ours, peer // speeds
		if !moreIsBetter(t.Columns[0]) {
			a, b = 1/ours, 1/peer
		}
		longest := max(a, b)
		fmt.Fprintf(&bars, "<text x=\"%d\" y=\"%d\" text-anchor=\"end\" font-weight=\"bold\">%s</text>\n", barLeft-10, y+13, h.name)
		bar(&bars, y, a/longest, "#1f6feb", fmt.Sprintf("Holdfast %s %s", plain(ours), h.unit))
		bar(&bars, y+barHeight+2, b/longest, "#8b949e", fmt.Sprintf("%s %s", shortName(t.Summary.Peer), plain(peer)))
		y += 2*barHeight + 16
	}
	return fmt.Sprintf("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"960\" height=\"%d\" font-family=\"sans-serif\" font-size=\"13\" role=\"img\">\n"+
		"<title>Holdfast beside the fastest peer of each table: a longer bar is faster</title>\n<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n"+
		"<text x=\"10\" y=\"20\">Beside the fastest peer, longer is faster.</text>\n%s</svg>\n", y, bars.String())
}

func bar(b *strings.Builder, y int, share float64, colour, label string) {
	width := int(share*barWidth + 0.5)
	fmt.Fprintf(b, "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" fill=\"%s\"/><text x=\"%d\" y=\"%d\">%s</text>\n",
		barLeft, y, width, barHeight, colour, barLeft+width+8, y+13, label)
}

// shortName is a contender's name without its settings.
func shortName(name string) string {
	name, _, _ = strings.Cut(name, ",")
	return name
}
