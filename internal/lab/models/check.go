package main

import (
	"bytes"
	"cmp"
	"context"
	"embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"
)

//go:embed *.pml
var files embed.FS

// model is a Promela file with the claims of its head comment.
type model struct {
	name, text string
	properties []property
}

// property is a claim of a model, with the mutants that break it.
type property struct {
	kind, claim string
	mutants     []mutant
}

// mutant is a planted bug.
type mutant struct{ define, bug string }

// The kinds of properties. A search for safety finds failed assertions, and states in which nothing can happen although
// work is left. A search for progress finds endless runs, of fair processes, that never reach the state of the claim ltl.
const (
	safety   = "safety"
	progress = "progress"
)

// claimLine matches a property or a mutant in a head comment. A claim may continue on the next line.
var claimLine = regexp.MustCompile(`(?m)^ \* (PROPERTY|MUTANT_\d+) (safety|progress): (.*(?:\n \* [a-z].*)*)$`)

// readModels returns the models whose names contain text.
func readModels(text string) (models []model, err error) {
	entries, err := files.ReadDir(".")
	if err != nil {
		return nil, err
	}
	for _, entry := range entries {
		name := strings.TrimSuffix(entry.Name(), ".pml")
		if !strings.Contains(name, text) {
			continue
		}
		data, err := files.ReadFile(entry.Name())
		if err != nil {
			return nil, err
		}
		models = append(models, parse(name, string(data)))
	}
	if len(models) == 0 {
		return nil, fmt.Errorf("no model has a name with %q", text)
	}
	return models, nil
}

func parse(name, text string) model {
	m := model{name: name, text: text}
	for _, found := range claimLine.FindAllStringSubmatch(text, -1) {
		claim := strings.ReplaceAll(found[3], "\n * ", " ")
		if found[1] == "PROPERTY" {
			m.properties = append(m.properties, property{kind: found[2], claim: claim})
			continue
		}
		for i := range m.properties {
			if p := &m.properties[i]; p.kind == found[2] {
				p.mutants = append(p.mutants, mutant{found[1], claim})
			}
		}
	}
	return m
}

// missingProgram returns a program that the check needs and that is not installed, or "".
func missingProgram() string {
	for _, program := range []string{"spin", "cc"} {
		if _, err := exec.LookPath(program); err != nil {
			return program
		}
	}
	return ""
}

// row is the result of one property.
type row struct {
	model, property string
	result          search
	found, planted  int
}

// checkAll checks the properties side by side, one for each CPU at a time. It returns the rows in the order of the models.
func checkAll(ctx context.Context, models []model) ([]row, error) {
	var rows []row
	var searches []func()
	var errs []error
	var mu sync.Mutex
	var all sync.WaitGroup
	slots := make(chan struct{}, runtime.NumCPU())
	search := func(i int, m model, p property, planted *mutant) {
		slots <- struct{}{}
		defer func() { <-slots }()
		result, err := m.search(ctx, p.kind, planted)
		mu.Lock()
		defer mu.Unlock()
		switch {
		case err != nil:
		case planted == nil:
			rows[i].result = result
			if result.fault != "" {
				err = errors.New(result.fault)
			}
		case result.fault == "":
			err = errors.New("the bug was not found")
		default:
			rows[i].found++
		}
		if err != nil {
			define := ""
			if planted != nil {
				define = " " + planted.define
			}
			errs = append(errs, fmt.Errorf("%s %s%s: %w", m.name, p.kind, define, err))
		}
	}
	for _, m := range models {
		for _, p := range m.properties {
			i := len(rows)
			rows = append(rows, row{model: m.name, property: p.kind + ": " + p.claim, planted: len(p.mutants)})
			searches = append(searches, func() { search(i, m, p, nil) })
			for _, planted := range p.mutants {
				searches = append(searches, func() { search(i, m, p, &planted) })
			}
		}
	}
	for _, one := range searches { // now that rows does not grow
		all.Go(one)
	}
	all.Wait()
	return rows, errors.Join(errs...)
}

func table(rows []row) string {
	var b strings.Builder
	b.WriteString("| model | property | states | depth | CPU seconds | mutants found |\n|---|---|---|---|---|---|\n")
	for _, r := range rows {
		fmt.Fprintf(&b, "| [%s](%[1]s.pml) | %s | %s | %d | %.1f | %d of %d |\n",
			r.model, r.property, grouped(r.result.states), r.result.depth, r.result.cpu.Seconds(), r.found, r.planted)
	}
	return b.String()
}

// grouped writes a number with a comma after each three digits.
func grouped(n int) string {
	if n < 1000 {
		return strconv.Itoa(n)
	}
	return fmt.Sprintf("%s,%03d", grouped(n/1000), n%1000)
}

// search is the result of an exhaustive search.
type search struct {
	states, depth int
	fault         string        // the violation that was found first; "" if there is none
	cpu           time.Duration // of the search, without compiling it
}

// memory bounds one search, in MiB.
const memory = 3000

// search translates the model, compiles it and searches all its states, or until it finds a violation.
func (m model) search(ctx context.Context, kind string, planted *mutant) (result search, err error) {
	folder, err := os.MkdirTemp("", "models")
	if err != nil {
		return result, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(folder)) }()
	if err := os.WriteFile(filepath.Join(folder, "model.pml"), []byte(m.text), 0o644); err != nil {
		return result, err
	}
	translate := []string{"spin", "-a"}
	if planted != nil {
		translate = append(translate, "-D"+planted.define)
	}
	compile := []string{"cc", "-w", fmt.Sprintf("-DMEMLIM=%d", memory), "-o", "pan", "pan.c"}
	if planted == nil {
		compile = append(compile, "-O2") // takes twice as long as -O1, which is more than most searches for a mutant take
	} else {
		compile = append(compile, "-O1")
	}
	pan := []string{"./pan", "-m1000000", "-w22"}
	if kind == progress {
		translate = append(translate, "-DFAULTS=1")
		compile = append(compile, "-DNFAIR=3")
		pan = append(pan, "-a", "-f")
	} else {
		compile = append(compile, "-DSAFETY", "-DNOCLAIM")
	}
	for _, command := range [][]string{append(translate, "model.pml"), compile} {
		if out, _, err := execute(ctx, folder, command); err != nil {
			return result, fmt.Errorf("%s: %w\n%s", command[0], err, out)
		}
	}
	out, cpu, err := execute(ctx, folder, pan) // pan exits with 0 also after it found a violation
	if err != nil {
		return result, fmt.Errorf("pan: %w\n%s", err, out)
	}
	result, err = resultOf(string(out))
	result.cpu = cpu
	return result, err
}

// execute returns the output of a command, and the CPU time that it used.
func execute(ctx context.Context, folder string, command []string) ([]byte, time.Duration, error) {
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Dir = folder
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		return out.Bytes(), 0, err
	}
	return out.Bytes(), cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime(), nil
}

var (
	summary = regexp.MustCompile(`depth reached (\d+), errors: (\d+)`)
	stored  = regexp.MustCompile(`(?m)^ *(\d+) states, stored`)
	fault   = regexp.MustCompile(`(?m)^pan:\d+: (.*)$`)
	// unreached matches a statement that was never executed. The last one of an endless process is named -end-.
	unreached = regexp.MustCompile(`(?m)^\tmodel\.pml:(\d+), state \d+, "([^-].*)"$`)
	// incomplete are the texts with which pan reports that it has left out states.
	incomplete = []string{"max search depth too small", "reached -DMEMLIM bound", "out of memory", "Bit statespace", "hash conflicts reached"}
)

// resultOf reads the report of pan. An incomplete search is an error.
func resultOf(out string) (search, error) {
	for _, text := range incomplete {
		if strings.Contains(out, text) {
			return search{}, fmt.Errorf("the search was not exhaustive: %s", text)
		}
	}
	head, states, found := summary.FindStringSubmatch(out), stored.FindStringSubmatch(out), fault.FindStringSubmatch(out)
	if head == nil || states == nil || (head[2] == "0") != (found == nil) {
		return search{}, fmt.Errorf("unknown report of pan:\n%s", out)
	}
	var r search
	var err1, err2 error
	r.depth, err1 = strconv.Atoi(head[1])
	r.states, err2 = strconv.Atoi(states[1])
	if found != nil {
		r.fault = found[1]
	} else if strings.Contains(out, "Search not completed") {
		return search{}, errors.New("the search was not completed")
	} else if dead := unreached.FindStringSubmatch(out); dead != nil {
		return search{}, fmt.Errorf("no state of the model reaches line %s: %s", dead[1], dead[2])
	}
	return r, cmp.Or(err1, err2)
}
