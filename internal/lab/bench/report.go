package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"slices"
	"strings"
	"time"
)

// report is what was measured on a machine.
type report struct {
	Machine string     `json:"machine"`
	Runs    []ran      `json:"runs"`
	Tables  []measured `json:"tables"`
	Goals   []kept     `json:"goals"`
}

// ran tells how a workload was measured.
type ran struct {
	Workload string    `json:"workload"`
	Command  string    `json:"command"`
	Commit   string    `json:"commit"`
	Began    time.Time `json:"began"`
	Rounds   int       `json:"rounds"`
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

// contestant is a contender with its figures, by column, its ratios, by yardstick, and the percentages of processor time,
// by user.
type contestant struct {
	Name    string   `json:"name"`
	Figures []spread `json:"figures"`
	Ratios  []spread `json:"ratios,omitempty"`
	Used    []spread `json:"used,omitempty"`
}

// standing compares ours with the best of others by the first column. A name is empty where there is none.
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

// MarshalJSON writes the median and both ends; null where there is no figure.
func (s spread) MarshalJSON() ([]byte, error) {
	if math.IsNaN(s.median) || math.IsInf(s.median, 0) {
		return []byte("null"), nil
	}
	return json.Marshal([]float64{s.median, s.least, s.most})
}

// UnmarshalJSON reads what MarshalJSON writes.
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

// add returns what the report has of a table.
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

// The beginnings of contenders' names; all others are raw clients.
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

// standing compares the first of ours, which is what the table is about and does the work of the others, with the best raw
// client that is a yardstick and with the best peer.
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
		case len(r.table.yardsticks) > 0 && !slices.Contains(r.table.yardsticks, c.name): // it does a part of the work
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

// moreIsBetter tells rates from costs and times.
func moreIsBetter(column string) bool { return strings.HasSuffix(column, "/s") }

func better(column string, one, other float64) bool {
	if moreIsBetter(column) {
		return one > other
	}
	return one < other
}

// save writes the report as name.json and name.md.
func (r *report) save(name string) error {
	data, err := json.MarshalIndent(r, "", "\t")
	if err != nil {
		return err
	}
	return errors.Join(os.WriteFile(name+".json", append(data, '\n'), 0o644), os.WriteFile(name+".md", []byte(r.markdown()), 0o644))
}

// workloads are those with a table, in their order.
func (r *report) workloads() (names []string) {
	for _, t := range r.Tables {
		if len(names) == 0 || names[len(names)-1] != t.Workload {
			names = append(names, t.Workload)
		}
	}
	return names
}

// beside returns the report with the workloads of an earlier one that it has not measured. A workload is compared within
// one run, so each may have a run of its own.
func (r *report) beside(earlier report) *report {
	all := &report{Machine: r.Machine}
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

// earlierReport reads what a report of this machine has. There may be none.
func earlierReport(file, machine string) (report, error) {
	r, err := readReport(file)
	if errors.Is(err, fs.ErrNotExist) || err == nil && r.Machine != machine {
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
