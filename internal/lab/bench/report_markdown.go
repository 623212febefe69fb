package main

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// markdown shows the report.
func (r *report) markdown() string {
	var b strings.Builder
	fmt.Fprintf(&b, "# Performance\n\n%s. Contenders of a table took turns, round after round. A figure is the median [least .. most] of the rounds, a ratio the median of the ratios within a round: ratios count, absolute figures are the machine's.\n\n", r.Machine)
	b.WriteString("| workload | command | commit | begun | rounds |\n|---|---|---|---|---|\n")
	for _, one := range r.Runs {
		fmt.Fprintf(&b, "| %s | `%s` | %s | %s | %d |\n", one.Workload, one.Command, one.Commit, one.Began.UTC().Format("2006-01-02 15:04"), one.Rounds)
	}
	r.standings(&b)
	r.goals(&b)
	for _, workload := range r.workloads() {
		fmt.Fprintf(&b, "\n## %s\n", workload)
		for _, t := range r.Tables {
			if t.Workload == workload {
				t.markdown(&b)
			}
		}
	}
	r.shares(&b)
	return b.String()
}

// shares shows where the processors' time went, for tables that were measured with it.
func (r *report) shares(b *strings.Builder) {
	if !slices.ContainsFunc(r.Tables, func(t measured) bool {
		return slices.ContainsFunc(t.Rows, func(row contestant) bool { return len(row.Used) > 0 })
	}) {
		return
	}
	b.WriteString("\n## Where the processors' time goes\n\nIn percent of all their time: what is idle waits for answers. Servers share the machine with this process.\n\n| what | |")
	for _, name := range userNames {
		fmt.Fprintf(b, " %s |", name)
	}
	b.WriteString("\n|" + strings.Repeat("---|", 2+int(users)) + "\n")
	for _, t := range r.Tables {
		for _, row := range t.Rows {
			if len(row.Used) == int(users) {
				fmt.Fprintf(b, "| %s | %s |%s\n", t.Title, row.Name, row.spent())
			}
		}
	}
}

// spent is a row's processor time as cells.
func (c contestant) spent() (cells string) {
	for _, used := range c.Used {
		cells += " " + written(used.median, 0) + " |"
	}
	return cells
}

func (r *report) standings(b *strings.Builder) {
	b.WriteString("\n## Ours, the raw client, the best peer\n\nOf a table the first of ours, which does the same work, the fastest raw client and the fastest peer. Rates: more than 1.00 is better; times and costs: less.\n\n")
	b.WriteString("| what | unit | ours | of raw | raw | of the peer | peer |\n|---|---|---|---|---|---|---|\n")
	for _, t := range r.Tables {
		s := t.Summary
		if s.Ours == "" || s.Raw == "" && s.Peer == "" {
			continue
		}
		fmt.Fprintf(b, "| %s | %s | %s | %s | %s | %s | %s |\n", t.Title, t.Columns[0], s.Ours, s.OverRaw, or(s.Raw), s.OverPeer, or(s.Peer))
	}
}

func or(name string) string {
	if name == "" {
		return "-"
	}
	return name
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

// String shows three digits or more, and the ends where they differ.
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
