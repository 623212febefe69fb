package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"text/tabwriter"
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

	workload string  // that runs
	at       string  // what of it runs, for errors
	report   *report // nil: none is kept
	goals    []goal
	servers  servers
	shops    *shop.Place // once it is asked for
	used     shares      // in the last stretch that was observed
}

// table compares contenders that do the same work in ways of their own.
type table struct {
	title      string
	columns    []column                        // of a sample; ratios compare the first one
	prepare    func(ctx context.Context) error // before every run; nil for nothing
	contenders []contender
	yardsticks []string // contenders that the others are divided by
}

type column struct {
	name     string
	decimals int
	most     bool // show the most of all rounds, not their median
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
	if b.report != nil {
		b.report.table(b.workload, r)
	}
	check(r.print(b.out))
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

func (r results) print(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(w, "\n%s\n", r.table.title)
	fmt.Fprintf(w, "\t%s\t[min .. max]\t", r.table.columns[0].name)
	for _, name := range r.table.yardsticks {
		fmt.Fprintf(w, "x %s\t", name)
	}
	for _, c := range r.table.columns[1:] {
		fmt.Fprintf(w, "%s\t", c.name)
	}
	fmt.Fprintln(w)
	for _, c := range r.table.contenders {
		r.printRow(w, c.name)
	}
	return w.Flush()
}

// nameWidth aligns the names on the left, in a table whose figures are on the right.
func (r results) nameWidth() (width int) {
	for _, c := range r.table.contenders {
		width = max(width, len(c.name))
	}
	return width
}

func (r results) printRow(w io.Writer, name string) {
	first := r.column(name, 0)
	decimals := r.table.columns[0].decimals
	fmt.Fprintf(w, "%-*s\t%.*f\t[%.*f .. %.*f]\t", r.nameWidth(), name, decimals, first.median, decimals, first.least, decimals, first.most)
	for _, yardstick := range r.table.yardsticks {
		fmt.Fprintf(w, "%.2f\t", r.ratio(name, yardstick).median)
	}
	for i, c := range r.table.columns[1:] {
		s := r.column(name, i+1)
		figure := s.median
		if c.most {
			figure = s.most
		}
		fmt.Fprintf(w, "%s\t", written(figure, c.decimals))
	}
	fmt.Fprintln(w)
}

// written shows a figure that there is not, which is NaN, as a dash.
func written(figure float64, decimals int) string {
	if math.IsNaN(figure) {
		return "-"
	}
	return strconv.FormatFloat(figure, 'f', decimals, 64)
}

// goal is a figure and the bound it is held against.
type goal struct {
	text    string
	got     spread
	bound   float64
	atLeast bool // else at most
}

func (g goal) met() bool {
	order := cmp.Compare(g.got.median, g.bound)
	return order == 0 || (order > 0) == g.atLeast
}

// atLeast and atMost note a goal; its median decides.
func (b *bench) atLeast(bound float64, got spread, text string) {
	b.hold(goal{text, got, bound, true})
}

func (b *bench) atMost(bound float64, got spread, text string) {
	b.hold(goal{text, got, bound, false})
}

func (b *bench) hold(g goal) {
	b.goals = append(b.goals, g)
	if b.report != nil {
		b.report.goal(b.workload, g)
	}
}

func (b *bench) printGoals() error {
	w := tabwriter.NewWriter(b.out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "\ngoals\n")
	for _, g := range b.goals {
		verdict, sign := "missed", "<="
		if g.met() {
			verdict = "met"
		}
		if g.atLeast {
			sign = ">="
		}
		bound := strconv.FormatFloat(g.bound, 'f', -1, 64)
		fmt.Fprintf(w, "%s\t%.2f\t[%.2f .. %.2f]\t%s %s\t%s\n", verdict, g.got.median, g.got.least, g.got.most, sign, bound, g.text)
	}
	return w.Flush()
}
