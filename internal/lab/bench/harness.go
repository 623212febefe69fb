package main

import (
	"context"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/shop"
)

// bench runs tables and keeps their goals.
type bench struct {
	out      io.Writer
	length   time.Duration // of one run
	rounds   int
	messages int // drained by one run
	rows     int // of a table in which a tenth is due

	workload string // that runs
	at       string // what of it runs, for errors
	report   *report
	servers  servers
	shops    *shop.Place // once it is asked for
	used     shares      // in the last stretch that was observed
}

// table compares contenders that do the same work in ways of their own.
type table struct {
	title      string
	columns    []string                        // of a sample; ratios compare the first one
	prepare    func(ctx context.Context) error // before every run; nil for nothing
	contenders []contender
	yardsticks []string // contenders that the others are divided by
}

type contender struct {
	name string
	run  func(ctx context.Context, length time.Duration) sample
}

// sample is what one run measured, column by column.
type sample []float64

// results are the samples of a table by contender and round.
type results struct {
	table table
	runs  map[string][]sample
	used  map[string][]shares
}

// measure warms every contender up, lets them take turns, and prints the table.
func (b *bench) measure(ctx context.Context, t table) results {
	r := results{table: t, runs: map[string][]sample{}, used: map[string][]shares{}}
	for _, c := range t.contenders {
		b.at = t.title + ": " + c.name
		t.runOnce(ctx, c, min(b.length/2, time.Second))
	}
	for range b.rounds {
		for _, c := range t.contenders {
			b.at = t.title + ": " + c.name
			s, used := b.runObserved(ctx, t, c)
			r.runs[c.name], r.used[c.name] = append(r.runs[c.name], s), append(r.used[c.name], used)
		}
	}
	var text strings.Builder
	b.report.add(b.workload, r).markdown(&text)
	fmt.Fprint(b.out, text.String())
	return r
}

// runObserved returns the shares of the processors during the stretch that the run delimits, else during the whole run.
func (b *bench) runObserved(ctx context.Context, t table, c contender) (sample, shares) {
	b.used = shares{}
	t.prepared(ctx)
	end := b.observe()
	s := t.runPrepared(ctx, c, b.length)
	if b.used == (shares{}) {
		end()
	}
	return s, b.used
}

func (t table) runOnce(ctx context.Context, c contender, length time.Duration) sample {
	t.prepared(ctx)
	return t.runPrepared(ctx, c, length)
}

func (t table) prepared(ctx context.Context) {
	if t.prepare == nil {
		return
	}
	check(t.prepare(ctx))
}

func (t table) runPrepared(ctx context.Context, c contender, length time.Duration) sample {
	s := c.run(ctx, length)
	check(ctx.Err())
	return s
}

// spread is the middle and the ends of some figures.
type spread struct{ median, least, most float64 }

func spreadOf(figures []float64) spread {
	s := slices.Sorted(slices.Values(figures))
	n := len(s)
	return spread{(s[(n-1)/2] + s[n/2]) / 2, s[0], s[n-1]}
}

func exactly(figure float64) spread { return spread{figure, figure, figure} }

func (r results) column(contender string, col int) spread {
	var figures []float64
	for _, s := range r.runs[contender] {
		figures = append(figures, s[col])
	}
	return spreadOf(figures)
}

// ratio compares the first column, round by round.
func (r results) ratio(contender, yardstick string) spread {
	var ratios []float64
	for round, s := range r.runs[contender] {
		ratios = append(ratios, s[0]/r.runs[yardstick][round][0])
	}
	return spreadOf(ratios)
}

// written shows a figure that there is not, which is NaN, as a dash.
func written(figure float64, decimals int) string {
	if math.IsNaN(figure) {
		return "-"
	}
	return strconv.FormatFloat(figure, 'f', decimals, 64)
}

// atLeast and atMost note a goal; its median decides.
func (b *bench) atLeast(bound float64, got spread, text string) {
	b.report.Goals = append(b.report.Goals, kept{b.workload, text, got, bound, true, got.median >= bound})
}

func (b *bench) atMost(bound float64, got spread, text string) {
	b.report.Goals = append(b.report.Goals, kept{b.workload, text, got, bound, false, got.median <= bound})
}
