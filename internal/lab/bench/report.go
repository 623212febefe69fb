package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

// report has the results of the workloads. Each was measured on one machine.
type report struct {
	Runs   []ran      `json:"runs"`
	Tables []measured `json:"tables"`
	Goals  []kept     `json:"goals"`
}

// ran describes how a workload was measured.
type ran struct {
	Workload string    `json:"workload"`
	Command  string    `json:"command"`
	Commit   string    `json:"commit"`
	Began    time.Time `json:"began"`
	Rounds   int       `json:"rounds"`
	Machine  string    `json:"machine"`
}

// measured is a table with its figures.
type measured struct {
	Workload   string       `json:"workload"`
	Title      string       `json:"title"`
	Columns    []string     `json:"columns"`
	Yardsticks []string     `json:"yardsticks,omitempty"`
	Rows       []contestant `json:"rows"`
	Summary    standing     `json:"summary"`
}

// contestant is a contender with its figures by column, its ratios by yardstick, and its percentages of processor time by
// user.
type contestant struct {
	Name    string   `json:"name"`
	Figures []spread `json:"figures"`
	Ratios  []spread `json:"ratios,omitempty"`
	Used    []spread `json:"used,omitempty"`
}

// standing compares ours with the best of the others by the first column. A name is empty if there is none.
type standing struct {
	Ours     string `json:"ours"`
	Raw      string `json:"raw"`
	Peer     string `json:"peer"`
	OverRaw  spread `json:"overRaw"`
	OverPeer spread `json:"overPeer"`
}

// kept is a goal with its verdict.
type kept struct {
	Workload string  `json:"workload"`
	Text     string  `json:"text"`
	Got      spread  `json:"got"`
	Bound    float64 `json:"bound"`
	AtLeast  bool    `json:"atLeast"`
	Met      bool    `json:"met"`
}

// MarshalJSON writes the median and both ends; null for a missing figure.
func (s spread) MarshalJSON() ([]byte, error) {
	if math.IsNaN(s.median) || math.IsInf(s.median, 0) {
		return []byte("null"), nil
	}
	return json.Marshal([]float64{s.median, s.least, s.most})
}

// UnmarshalJSON reads the output of MarshalJSON.
func (s *spread) UnmarshalJSON(text []byte) error {
	var ends []float64
	if err := json.Unmarshal(text, &ends); err != nil {
		return err
	}
	switch len(ends) {
	case 0:
		*s = exactly(math.NaN())
		return nil
	case 3:
		*s = spread{ends[0], ends[1], ends[2]}
		return nil
	}
	return fmt.Errorf("a figure has %d parts, want a median and two ends", len(ends))
}

// add stores a table and returns its entry in the report.
func (r *report) add(workload string, from results) measured {
	m := measured{Workload: workload, Title: from.table.title, Columns: from.table.columns, Yardsticks: from.table.yardsticks, Summary: from.standing()}
	for _, c := range from.table.contenders {
		one := contestant{Name: c.name}
		for col := range from.table.columns {
			one.Figures = append(one.Figures, from.column(c.name, col))
		}
		for _, yardstick := range from.table.yardsticks {
			one.Ratios = append(one.Ratios, from.ratio(c.name, yardstick))
		}
		for user := range users {
			one.Used = append(one.Used, from.share(c.name, user))
		}
		m.Rows = append(m.Rows, one)
	}
	r.Tables = append(r.Tables, m)
	return m
}

// The prefixes of contenders' names. All other contenders are raw clients.
var (
	ourNames  = []string{"holdfast", "txretry", "outboxpgx"}
	peerNames = []string{"river", "watermill", "crdbpgxv5", "redis_rate", "sethvargo", "throttled", "ulule"}
)

func beginsWith(name string, beginnings []string) bool {
	for _, b := range beginnings {
		if strings.HasPrefix(name, b) {
			return true
		}
	}
	return false
}

// standing compares our first contender, which does the work of the others, with the best raw client among the yardsticks
// and with the best peer.
func (r results) standing() (s standing) {
	for _, c := range r.table.contenders {
		best := &s.Raw
		switch {
		case beginsWith(c.name, ourNames):
			if s.Ours == "" {
				s.Ours = c.name
			}
			continue
		case beginsWith(c.name, peerNames):
			best = &s.Peer
		case len(r.table.yardsticks) > 0 && !slices.Contains(r.table.yardsticks, c.name): // it does only a part of the work
			continue
		}
		if *best == "" || better(r.table.columns[0], r.column(c.name, 0).median, r.column(*best, 0).median) {
			*best = c.name
		}
	}
	s.OverRaw, s.OverPeer = r.between(s.Ours, s.Raw), r.between(s.Ours, s.Peer)
	return s
}

func (r results) between(one, other string) spread {
	if one == "" || other == "" {
		return exactly(math.NaN())
	}
	return r.ratio(one, other)
}

// moreIsBetter distinguishes rates from costs and times.
func moreIsBetter(column string) bool { return strings.HasSuffix(column, "/s") }

func better(column string, one, other float64) bool {
	if moreIsBetter(column) {
		return one > other
	}
	return one < other
}

// save writes the report as name.json and name.md, with the chart name.svg.
func (r *report) save(name string) error {
	data, err := json.MarshalIndent(r, "", "\t")
	if err != nil {
		return err
	}
	return errors.Join(os.WriteFile(name+".json", append(data, '\n'), 0o644), os.WriteFile(name+".md", []byte(r.markdown()), 0o644),
		os.WriteFile(name+".svg", []byte(r.chart()), 0o644))
}

// workloads returns the workloads with a table, in order.
func (r *report) workloads() (names []string) {
	for _, t := range r.Tables {
		if len(names) == 0 || names[len(names)-1] != t.Workload {
			names = append(names, t.Workload)
		}
	}
	return names
}

// beside returns the report plus the workloads of an earlier report that it has not measured. A workload is compared
// within one run, so each workload may have its own run.
func (r *report) beside(earlier report) *report {
	all := &report{}
	for _, w := range workloads() {
		from := &earlier
		if slices.ContainsFunc(r.Runs, func(one ran) bool { return one.Workload == w.name }) {
			from = r
		}
		all.Runs = append(all.Runs, only(from.Runs, w.name, func(one ran) string { return one.Workload })...)
		all.Tables = append(all.Tables, only(from.Tables, w.name, func(t measured) string { return t.Workload })...)
		all.Goals = append(all.Goals, only(from.Goals, w.name, func(g kept) string { return g.Workload })...)
	}
	return all
}

func only[T any](all []T, workload string, of func(T) string) []T {
	return slices.DeleteFunc(slices.Clone(all), func(one T) bool { return of(one) != workload })
}

// earlierReport reads the existing report. There may be none.
func earlierReport(file string) (report, error) {
	r, err := readReport(file)
	if errors.Is(err, fs.ErrNotExist) {
		return report{}, nil
	}
	return r, err
}

func readReport(file string) (r report, err error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return r, err
	}
	if err := json.Unmarshal(data, &r); err != nil {
		return r, fmt.Errorf("%s: %w", file, err)
	}
	return r, nil
}

// markdown renders the report.
func (r *report) markdown() string {
	var b strings.Builder
	b.WriteString("# Performance\n\nEach row compares the same work in one run on one machine. " +
		"The raw limit is the bare client with the same guarantees where it can have them. Ratios count, since absolute figures depend on the machine. " +
		"More than 1.00 is better for rates, less for times.\n\n")
	r.summary(&b)
	b.WriteString("\n![Holdfast beside the fastest peer of each table](performance.svg)\n")
	b.WriteString("\n## How it was measured\n\nContenders of a table took turns, round after round. " +
		"A figure is the median [least .. most] of the rounds, a ratio the median of the ratios within a round. " +
		"The load is the machine's average before the workload: above 2, other work had a share of it, and its figures do not compare with those of an idle machine.\n\n")
	b.WriteString("| workload | command | commit | begun | rounds | machine |\n|---|---|---|---|---|---|\n")
	for _, one := range r.Runs {
		fmt.Fprintf(&b, "| %s | `%s` | %s | %s | %d | %s |\n",
			one.Workload, one.Command, one.Commit, one.Began.UTC().Format("2006-01-02 15:04"), one.Rounds, one.Machine)
	}
	for _, workload := range r.workloads() {
		fmt.Fprintf(&b, "\n## %s\n", workload)
		for _, t := range r.Tables {
			if t.Workload == workload {
				t.markdown(&b)
			}
		}
	}
	r.goals(&b)
	return b.String()
}

func (r *report) goals(b *strings.Builder) {
	met := 0
	for _, g := range r.Goals {
		if g.Met {
			met++
		}
	}
	fmt.Fprintf(b, "\n## Goals: %d of %d are met\n\n| | workload | goal | bound | got | why |\n|---|---|---|---|---|---|\n", met, len(r.Goals))
	var told []int
	for _, g := range r.Goals {
		verdict, sign, why := "missed", "≤", ""
		if g.Met {
			verdict = "met"
		} else if n := reasonOf(g); n >= 0 {
			if !slices.Contains(told, n) {
				told = append(told, n)
			}
			why = fmt.Sprintf("(%d)", 1+slices.Index(told, n))
		}
		if g.AtLeast {
			sign = "≥"
		}
		fmt.Fprintf(b, "| %s | %s | %s | %s %s | %s | %s |\n", verdict, g.Workload, g.Text, sign, strconv.FormatFloat(g.Bound, 'f', -1, 64), g.Got, why)
	}
	if len(told) > 0 {
		b.WriteString("\nWhy goals are missed:\n\n")
	}
	for i, n := range told {
		fmt.Fprintf(b, "%d. %s: %s\n", 1+i, reasons[n].workload, reasons[n].why)
	}
}

func (t measured) markdown(b *strings.Builder) {
	fmt.Fprintf(b, "\n%s\n\n| |", t.Title)
	for _, name := range t.Columns {
		fmt.Fprintf(b, " %s |", name)
	}
	for _, name := range t.Yardsticks {
		fmt.Fprintf(b, " × %s |", name)
	}
	b.WriteString("\n|" + strings.Repeat("---|", 1+len(t.Columns)+len(t.Yardsticks)) + "\n")
	for _, row := range t.Rows {
		fmt.Fprintf(b, "| %s |", row.Name)
		for _, figure := range row.Figures {
			fmt.Fprintf(b, " %s |", figure)
		}
		for _, ratio := range row.Ratios {
			fmt.Fprintf(b, " %s |", ratio)
		}
		b.WriteString("\n")
	}
}

// String shows at least three digits, and the ends if they differ.
func (s spread) String() string {
	if math.IsNaN(s.median) {
		return "-"
	}
	if s.least == s.most {
		return short(s.median)
	}
	return fmt.Sprintf("%s [%s .. %s]", short(s.median), short(s.least), short(s.most))
}

func short(figure float64) string {
	switch size := math.Abs(figure); {
	case size >= 100 || figure == math.Trunc(figure):
		return strconv.FormatFloat(figure, 'f', 0, 64)
	case size >= 10:
		return strconv.FormatFloat(figure, 'f', 1, 64)
	default:
		return strconv.FormatFloat(figure, 'f', 2, 64)
	}
}

// reason explains missed goals: their bottleneck, and the rows of the report that show it.
type reason struct {
	workload string
	of       []string // prefixes of the goals' texts
	why      string
}

func (r reason) speaksOf(g kept) bool {
	return r.workload == g.Workload && slices.ContainsFunc(r.of, func(beginning string) bool { return strings.HasPrefix(g.Text, beginning) })
}

// reasonOf returns the index of the goal's reason, or -1 if there is none.
func reasonOf(g kept) int {
	return slices.IndexFunc(reasons, func(r reason) bool { return r.speaksOf(g) })
}

var reasons = []reason{
	{
		"outbox",
		[]string{"of publish alone, raw client, unkeyed", "x river, 2000 workers, fetch cooldown 1 ms, unkeyed"},
		"A relay also claims, reads and deletes, on the same two cores as the broker and Postgres. " +
			"Where publishing alone has a rate p and `claim and settle alone` a rate c, both have about 1/(1/p + 1/c) if they do not overlap.",
	},
	{
		"outbox",
		[]string{"of unkeyed, 10 keys"},
		"The next message of a key leaves when the one before is confirmed, so ten keys have ten messages under way. " +
			"One that left sooner would overtake one that the broker rejects, because it may still store the next one of the channel: the model models/order.pml " +
			"shows that for two messages in flight.",
	},
	{
		"outbox",
		[]string{"x raw, NOTIFY in the transaction, p50"},
		"The raw relay reads without a lease: two of them would publish everything twice. A claim of ours is a transaction that leases lanes. " +
			"A Notifier sends its NOTIFY on another connection after the commit, so that commits of the business do not wait for each other by a NOTIFY's lock. " +
			"That is one more trip, and at least 2 ms lie between two of them.",
	},
	{
		"inbox",
		[]string{"of raw, its dedup entry in one trip with BEGIN", "x watermill router"},
		"The raw consumer sends the same statements in the same trips. Ours costs this process more (`client us/message`): " +
			"a message passes a receiver, a worker and an acknowledger, with a span, metrics, and checks of what it holds.",
	},
	{
		"idempotency",
		[]string{"us over the bare handler, first run in memory", "allocations over the bare handler, first run in memory"},
		"Every request has its key checked, a fingerprint of its body, a recorder for the answer, a copy of its header, a context with a lease, and a record in the store. " +
			"Two fifths of the processor time are allocation and collection. A pool would pass it to the next request while a handler's goroutine still uses it.",
	},
	{
		"idempotency",
		[]string{"of raw redis"},
		"A replay takes Redis 12.6 us of its processor, and SET NX GET 1.7; the script that claims a key takes 18.0, and SET NX 4.6 (medians of 12 runs on a busy machine). " +
			"The scripts are of four commands in Lua: they compare a token, write a hash and a lock, and have a reply for each state. " +
			"The checks that keep a value over 64 MiB out of a script are 4 us of a replay.",
	},
	{
		"idempotency",
		[]string{"of raw postgres, SELECT, no gate, replay"},
		"The raw client reads one column. A replay reads the whole record, decodes the headers and compares the fingerprint; the middleware writes the answer, too.",
	},
	{
		"idempotency",
		[]string{"of transaction alone, no gate, first run"},
		"A record is one more row in a table with two indexes: `transaction and a key row by hand` writes that row alone. " +
			"Ours also looks for the record and locks the key with BEGIN, and checks that no trigger dropped the row.",
	},
	{
		"ratelimit",
		[]string{"x redis_rate, holdfast"},
		"The peer decides about one limit in each call. Calls of ours share trips, so that Redis has the smaller share of the processors and this process the larger one: " +
			"what bounds `holdfast, user` is what a decision costs here, and `holdfast, user and global` decides about two limits in that time.",
	},
	{
		"shop",
		[]string{"of bare SQL by hand"},
		"By hand a hold is four round trips to one server. Ours also makes two to Redis for the key, one for the limits, and at most one NOTIFY in 2 ms; " +
			"its transaction is SERIALIZABLE. The whole shop relays, consumes and keeps a read model on the same two cores, too.",
	},
}
