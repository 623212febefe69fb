// Command soak shows that a long-running shop keeps its size, and that large tables do not cost more:
//
//	go run ./internal/lab/soak
//
// It runs the ticket shop, each role as a process, on private servers for half an hour. The load is half of the capacity,
// which it measures first. It decides whether memory, goroutines, connections, files, tables and queues are flat.
// -part=waiting drains an outbox with ten million messages. -part=snapshot holds an old snapshot for ten minutes, next to
// writers and a relay. -part=dedup lets the inbox record messages next to fifty million entries. -part=all runs the four one
// after the other, almost two hours; a failed part does not stop the next one. Flags make each part smaller.
//
// A series of the shop is flat if the line through its last two thirds gains no more than its bound, which the report shows
// ("flat up to"), or if the points do not rise with statistical certainty:
//
//   - Things that must not stay (rows of the outbox, messages in queues, overdue holds) are counted exactly, and the
//     least of six samples is judged: a leak of 200 rows an hour shows in half an hour. At the end the outbox must
//     have no row left.
//   - Goroutines, files and connections are also judged by the least of six samples: a leak of ten an hour shows.
//     Memory varies; a leak of less than 24 MiB an hour counts as flat (12 of Go's heap).
//   - The table and the indexes of the outbox may double. A leak of rows shows in their count long before: a few
//     hundred rows are less than the usual variation of autovacuum.
//   - Dead rows may grow to those of one or two more minutes. They do not leak one by one: whatever keeps VACUUM from
//     one dead row keeps it from all later ones, thousands a minute.
//
// The machine may be shared, so rates per second mean little. The criterion is processor time per operation: of this process
// ("client"), and of Postgres with all its children. Each part prints its report when it ends, and -markdown writes it into
// a file. The exit code is 1 if a finding is negative.
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

// sizes are the values of flags.
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

// part is a choice of -part. Its sizes apply unless a flag sets others.
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

// chosen returns the parts of that name.
func chosen(name string) (some []part) {
	for _, p := range parts {
		if name == all || name == p.name {
			some = append(some, p)
		}
	}
	return some
}

// sized returns s, and takes the sizes that s lacks from the part.
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

// command is the command to run one part again, with the given flags.
func command(part string, given *flag.FlagSet) string {
	text := "go run ./internal/lab/soak -part=" + part
	given.Visit(func(f *flag.Flag) {
		if f.Name != "part" {
			text += fmt.Sprintf(" -%s=%s", f.Name, f.Value)
		}
	})
	return text
}

// run runs the part and writes its report.
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

// report is the result of a part.
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

// finding is a condition with its result.
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

// atMost finds whether a figure is at most factor times its value before.
func (r *report) atMost(what string, before, during, factor float64) {
	r.find(during <= factor*before, "%s: %.1f, before %.1f: at most %.2f times that", what, during, before, factor)
}

// errNotSo is wrapped by the error of a verdict.
var errNotSo = errors.New("not as they should be")

// verdict returns an error if a finding is negative.
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

// markdown returns the report as a section of a document.
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

const title = "# Soak\n\nWritten by `go run ./internal/lab/soak`; its package comment explains the columns.\n"

// save writes the report into a file, as a section that replaces the section of the part's last run.
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

// rounds is how often the two sides of a comparison take turns. A busy machine makes both more expensive for a while; the
// median of the ratios within one round cancels that.
const rounds = 5

// compared has the costs of one operation on a small and on a large table, round by round.
type compared struct{ small, large []cost }

// alternate measures both in turns, a few times.
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

// total adds up rounds.
func total(costs []cost) (sum cost) {
	for _, c := range costs {
		sum.ops += c.ops
		sum.took += c.took
		sum.client += c.client
		sum.postgres += c.postgres
	}
	return sum
}

// ratio returns the processor time of Postgres for the large table, divided by the time for the small one.
func (c compared) ratio() float64 {
	var ratios []float64
	for i, large := range c.large {
		ratios = append(ratios, large.postgresPerOp()/c.small[i].postgresPerOp())
	}
	return median(ratios)
}

// noDearer is how much more an operation may cost next to much data.
const noDearer = 1.5

// sameCost finds whether the operation costs about the same.
func (r *report) sameCost(what string, c compared) {
	r.find(c.ratio() <= noDearer, "%s takes %.2f times the processor time of Postgres that it takes beside next to nothing (median of %d rounds): at most %.2f",
		what, c.ratio(), len(c.large), noDearer)
}
