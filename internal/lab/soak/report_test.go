package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/shop"
)

func sampleReport(part string, ok bool) *report {
	r := &report{Part: part, Command: "soak -part " + part, Commit: "v1.2.3-4-gabcdef", Began: time.Unix(0, 0), Took: "1s", Machine: "2 cores"}
	r.note("A note of %s.", part)
	r.Tables = []table{{Title: "rates", Columns: []string{"", "messages/s"}}}
	r.Tables[0].add("before", "100")
	r.find(ok, "%s is flat", part)
	return r
}

func TestReportForms(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	doc := filepath.Join(dir, "report.md")
	for _, part := range []string{"shop", "waiting", "dedup", "waiting"} {
		if err := sampleReport(part, part != "dedup").save(paths{filepath.Join(dir, part+".json"), doc}); err != nil {
			t.Fatal(err)
		}
	}
	text, err := os.ReadFile(doc)
	if err != nil {
		t.Fatal(err)
	}
	for _, once := range []string{"# Soak\n", "## shop\n", "## waiting\n", "## dedup\n", "| ok | shop is flat |", "| ok | waiting is flat |", "| NOT SO | dedup is flat |"} {
		if n := strings.Count(string(text), once); n != 1 {
			t.Errorf("%q is there %d times in\n%s", once, n, text)
		}
	}
	if n := strings.Count(string(text), "1970-01-01 00:00:00 UTC, commit v1.2.3-4-gabcdef, took 1s"); n != 3 {
		t.Errorf("%d commits, want one for each part:\n%s", n, text)
	}
	if n := strings.Count(string(text), "| before | 100 |"); n != 3 {
		t.Errorf("%d rows, want one for each part:\n%s", n, text)
	}

	var back report
	stored, err := os.ReadFile(filepath.Join(dir, "dedup.json"))
	if err == nil {
		err = json.Unmarshal(stored, &back)
	}
	if err != nil || back.Tables[0].Rows[0][1] != "100" || back.Findings[0].OK {
		t.Errorf("read back as %+v (%v)", back, err)
	}
	var out strings.Builder
	if err := back.text(&out); err != nil || !strings.Contains(out.String(), "NOT SO  dedup is flat") || !strings.Contains(out.String(), "before  100") {
		t.Errorf("as text (%v):\n%s", err, &out)
	}
}

// A part that is run again leaves all other sections as they are, whatever they hold.
func TestReplaceSection(t *testing.T) {
	t.Parallel()
	const before, after = "# Soak\n\nBy hand.\n\n## shop\n\nold shop\n\n", "## waiting\n\n10 wait.\n\n### more\n\n## dedup\n\nall\n"
	for part, want := range map[string]string{
		"shop":     "# Soak\n\nBy hand.\n\n## shop\n\nnew\n\n" + after,
		"waiting":  before + "## waiting\n\nnew\n\n## dedup\n\nall\n",
		"dedup":    before + "## waiting\n\n10 wait.\n\n### more\n\n## dedup\n\nnew\n",
		"snapshot": before + after + "\n## snapshot\n\nnew\n",
	} {
		if got := replaceSection(before+after, part, heading(part)+"\n\nnew\n"); got != want {
			t.Errorf("%s: %q, want %q", part, got, want)
		}
	}
}

func TestAnswers(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		full, half shop.Answers
		ok         bool
	}{
		"few are to ask again":         {shop.Answers{"201": 9}, shop.Answers{"201": 99_900, "503 LOCK_TIMEOUT": 60, "503": 40}, true},
		"more than one in a thousand":  {shop.Answers{"201": 9}, shop.Answers{"201": 99_899, "503 LOCK_TIMEOUT": 61, "503": 40}, false},
		"many of them at the capacity": {shop.Answers{"201": 9, "503": 5}, shop.Answers{"201": 1}, true},
		"an error at the capacity":     {shop.Answers{"201": 9, "500": 1}, shop.Answers{"201": 1}, false},
		"an error at half of it":       {shop.Answers{"201": 9}, shop.Answers{"201": 9, "no answer": 1}, false},
	} {
		r := &report{}
		if r.answers(c.full, c.half); (r.verdict() == nil) != c.ok {
			t.Errorf("%s: %v, want %v", name, r.Findings, c.ok)
		}
	}
}

// Seats that are held twice are found, and so is a run in which none was held when somebody looked.
func TestSeats(t *testing.T) {
	t.Parallel()
	for s, ok := range map[seats]bool{
		{looks: 9, held: 800}:           true,
		{looks: 9, held: 800, twice: 1}: false,
		{looks: 9}:                      false,
		{}:                              false,
	} {
		r := &report{}
		if s.judge(r); (r.verdict() == nil) != ok {
			t.Errorf("%+v: %v, want %v", s, r.Findings, ok)
		}
	}
}

func TestReportVerdict(t *testing.T) {
	t.Parallel()
	if err := sampleReport("shop", true).verdict(); err != nil {
		t.Error(err)
	}
	if err := sampleReport("shop", false).verdict(); err == nil || !strings.Contains(err.Error(), "shop is flat") {
		t.Errorf("a report of what is not so: %v", err)
	}
	r := &report{}
	r.atMost("cost", 10, 15, 1.5)
	r.atMost("cost", 10, 16, 1.5)
	if !r.Findings[0].OK || r.Findings[1].OK {
		t.Errorf("at most half as much again: %v", r.Findings)
	}
}
