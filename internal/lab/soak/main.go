// Command soak shows that what runs for long stays as it is, and that what is large costs no more:
//
//	go run ./internal/lab/soak
//
// runs the ticket shop, each role as a process, on private servers for half an hour at half of the capacity that
// it measures first, and decides whether memory, goroutines, connections, files, tables and queues are flat.
// -part=waiting drains an outbox with ten million messages; -part=snapshot holds an old snapshot for
// ten minutes beside writers and a relay; -part=dedup has the inbox record messages beside fifty million entries.
// -part=all runs the four one after the other, most of two hours: one that fails does not keep the next. Flags make each
// of them smaller.
//
// A series of the shop is flat if the line through its last two thirds gains no more than its bound, which the report shows
// ("flat up to"), or if the points do not rise with certainty:
//
//   - What must not stay (rows of the outbox, messages in queues, holds that are overdue) is counted exactly, and the least of
//     six samples is judged: a leak of 200 rows an hour shows in half an hour. At the end not one row of the outbox may be left.
//   - Goroutines, files and connections are judged by the least of six samples, too: a leak of ten an hour shows. Memory comes
//     and goes; a leak of less than 24 MiB an hour counts as flat (12 of Go's heap).
//   - The table and the indexes of the outbox may double. A leak of rows shows in their count long before: a few hundred
//     rows are less than what autovacuum moves by its time.
//   - Dead rows may become those of a minute or two more. They do not leak one by one: what keeps VACUUM from
//     one of them keeps it from all that die later, thousands a minute.
//
// The machine may be shared, so that rates per second say little. What decides is processor time per operation: of
// this process ("client"), and of Postgres with all its children. Each part prints its report as it ends, and
// -markdown writes it into a file. The exit code is 1 if something is not as it should be.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/provenance"
)

var quiet = slog.New(slog.DiscardHandler)

// sizes are what flags set.
type sizes struct {
	minutes  float64
	clients  int
	messages int64
	rows     int64
	body     int
	secs     float64
}

func (s sizes) stretch() time.Duration { return time.Duration(s.secs * float64(time.Second)) }
func (s sizes) length() time.Duration  { return time.Duration(s.minutes * float64(time.Minute)) }

// part is what -part chooses. Its sizes hold where no flag sets another.
type part struct {
	name    string
	do      func(context.Context, sizes, *report) error
	minutes float64
	clients int
	secs    float64
}

var parts = []part{
	{"shop", soakShop, 30, 50, 20},
	{"waiting", soakWaiting, 0, 8, 20},
	{"snapshot", soakSnapshot, 10, 4, 10},
	{"dedup", soakDedup, 0, 8, 5},
}

const all = "all"

// chosen are the parts of that name.
func chosen(name string) (some []part) {
	for _, p := range parts {
		if name == all || name == p.name {
			some = append(some, p)
		}
	}
	return some
}

// sized returns s, with the sizes of the part where s has none.
func (p part) sized(s sizes) sizes {
	s.minutes = cmp.Or(s.minutes, p.minutes)
	s.clients = cmp.Or(s.clients, p.clients)
	s.secs = cmp.Or(s.secs, p.secs)
	return s
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "soak:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	var s sizes
	var name string
	var to string
	flags := flag.NewFlagSet("soak", flag.ContinueOnError)
	flags.StringVar(&name, "part", "shop", "shop, waiting, snapshot, dedup, or all of them one after the other")
	flags.Float64Var(&s.minutes, "minutes", 0, "how many `minutes` the shop runs or the snapshot is held (default 30 and 10)")
	flags.IntVar(&s.clients, "clients", 0, "clients of the shop, or writers at a time (default 50 and 8, beside the snapshot 4)")
	flags.Int64Var(&s.messages, "messages", 10_000_000, "`number` of messages that wait")
	flags.Int64Var(&s.rows, "rows", 50_000_000, "`number` of entries that the inbox has")
	flags.IntVar(&s.body, "body", 512, "`bytes` of a message")
	flags.Float64Var(&s.secs, "secs", 0, "length of one measurement in `seconds` (default 20; 10 of snapshot, 5 of dedup)")
	flags.StringVar(&to, "markdown", "", "write the report into this `file`, each part as its section when it ends")
	if err := flags.Parse(args); err != nil {
		return err
	}
	some := chosen(name)
	if len(some) == 0 || flags.NArg() > 0 {
		return fmt.Errorf("-part is %q and the rest %q; the parts are shop, waiting, snapshot and dedup, or all", name, flags.Args())
	}
	if s.minutes < 0 || s.clients < 0 || s.messages < 10*leastDrained || s.rows < 10_000 || s.body < 2 || s.secs < 0 {
		return errors.New("no flag may be negative, -messages at least 100,000, -rows at least 10,000")
	}
	return runParts(ctx, some, s, flags, to, out)
}

// runParts runs the parts one after the other until ctx ends.
func runParts(ctx context.Context, some []part, s sizes, given *flag.FlagSet, to string, out io.Writer) error {
	commit := provenance.Commit() // before a report changes a file
	var failed []error
	for _, p := range some {
		r := &report{
			Part: p.name, Command: command(p.name, given), Commit: commit, Began: time.Now(),
			Machine: provenance.Machine(),
		}
		failed = append(failed, p.run(ctx, s, r, to, out))
		if ctx.Err() != nil {
			break
		}
	}
	return errors.Join(failed...)
}

// command is what runs one part again, with the flags that were given.
func command(part string, given *flag.FlagSet) string {
	text := "go run ./internal/lab/soak -part=" + part
	given.Visit(func(f *flag.Flag) {
		if f.Name != "part" {
			text += fmt.Sprintf(" -%s=%s", f.Name, f.Value)
		}
	})
	return text
}

// run does the part and writes its report.
func (p part) run(ctx context.Context, s sizes, r *report, to string, out io.Writer) error {
	if err := p.do(ctx, p.sized(s), r); err != nil {
		return fmt.Errorf("%s: %w", p.name, err)
	}
	r.Took = time.Since(r.Began).Round(time.Second).String()
	fmt.Fprintln(out, r.markdown())
	if to == "" {
		return r.verdict()
	}
	return errors.Join(r.save(to), r.verdict())
}

// report is what a part found out.
type report struct {
	Part     string
	Command  string
	Commit   string
	Began    time.Time
	Took     string
	Machine  string
	Notes    []string
	Tables   []table
	Findings []finding
}

// table has texts.
type table struct {
	Title   string
	Columns []string
	Rows    [][]string
}

func (t *table) add(cells ...string) { t.Rows = append(t.Rows, cells) }

// finding is what had to be true.
type finding struct {
	What string
	OK   bool
}

func (r *report) note(format string, args ...any) {
	r.Notes = append(r.Notes, fmt.Sprintf(format, args...))
}

func (r *report) find(ok bool, format string, args ...any) {
	r.Findings = append(r.Findings, finding{fmt.Sprintf(format, args...), ok})
}

// atMost finds that a figure is at most so many times what it was before.
func (r *report) atMost(what string, before, during, factor float64) {
	r.find(during <= factor*before, "%s: %.1f, before %.1f: at most %.2f times that", what, during, before, factor)
}

// errNotSo is in the error of a verdict.
var errNotSo = errors.New("not as they should be")

// verdict is an error if something was not true.
func (r *report) verdict() error {
	var wrong []error
	for _, f := range r.Findings {
		if !f.OK {
			wrong = append(wrong, errors.New(f.What))
		}
	}
	if len(wrong) == 0 {
		return nil
	}
	return fmt.Errorf("%s: %d of %d findings are %w: %w", r.Part, len(wrong), len(r.Findings), errNotSo, errors.Join(wrong...))
}

func (f finding) word() string {
	if f.OK {
		return "ok"
	}
	return "NOT SO"
}

// markdown is the report as a section of a document.
func (r *report) markdown() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n\n    %s\n\n%s UTC, commit %s, took %s, %s.\n", heading(r.Part), r.Command, r.Began.UTC().Format(time.DateTime), r.Commit, r.Took, r.Machine)
	for _, note := range r.Notes {
		fmt.Fprintf(&b, "\n%s\n", note)
	}
	for _, t := range r.Tables {
		fmt.Fprintf(&b, "\n%s:\n\n| %s |\n|%s\n", t.Title, strings.Join(t.Columns, " | "), strings.Repeat("---|", len(t.Columns)))
		for _, row := range t.Rows {
			fmt.Fprintf(&b, "| %s |\n", strings.Join(row, " | "))
		}
	}
	fmt.Fprint(&b, "\n| | finding |\n|---|---|\n")
	for _, f := range r.Findings {
		fmt.Fprintf(&b, "| %s | %s |\n", f.word(), f.What)
	}
	return b.String()
}

func heading(part string) string { return "## " + part }

const title = "# Soak\n\nWritten by `go run ./internal/lab/soak`; what the columns mean is in its package comment.\n"

// save writes the report into a file, as a section that replaces that of the last run of its part.
func (r *report) save(file string) error {
	old, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.WriteFile(file, []byte(replaceSection(string(old), r.Part, r.markdown())), 0o644)
}

// replaceSection replaces the section of a part in a document, or appends it.
func replaceSection(document, part, section string) string {
	if document == "" {
		document = title
	}
	begin := strings.Index(document, heading(part)+"\n")
	if begin < 0 {
		return strings.TrimRight(document, "\n") + "\n\n" + section
	}
	rest := document[begin+1:]
	if _, after, ok := strings.Cut(rest, "\n## "); ok {
		return document[:begin] + section + "\n## " + after
	}
	return document[:begin] + section
}

// rounds is how often what is compared takes turns: a busy machine makes both dearer for a while, and the median of the
// ratios within one round tells them from each other.
const rounds = 5

// compared are the costs of one operation on a small table and on a large one, round by round.
type compared struct{ small, large []cost }

// alternate measures both, one after the other, some times.
func alternate(small, large func() (cost, error)) (c compared, err error) {
	for range rounds {
		for _, side := range []struct {
			measure func() (cost, error)
			into    *[]cost
		}{{small, &c.small}, {large, &c.large}} {
			m, err := side.measure()
			if err != nil {
				return c, err
			}
			*side.into = append(*side.into, m)
		}
	}
	return c, nil
}

// total adds rounds up.
func total(costs []cost) (sum cost) {
	for _, c := range costs {
		sum.ops += c.ops
		sum.took += c.took
		sum.client += c.client
		sum.postgres += c.postgres
	}
	return sum
}

// ratio is how many times the processor time of Postgres the large table takes.
func (c compared) ratio() float64 {
	var ratios []float64
	for i, large := range c.large {
		ratios = append(ratios, large.postgresPerOp()/c.small[i].postgresPerOp())
	}
	return median(ratios)
}

// noDearer is how much more an operation may cost beside much data.
const noDearer = 1.5

// sameCost finds that the operation costs about the same.
func (r *report) sameCost(what string, c compared) {
	r.find(c.ratio() <= noDearer, "%s takes %.2f times the processor time of Postgres that it takes beside next to nothing (median of %d rounds): at most %.2f",
		what, c.ratio(), len(c.large), noDearer)
}
