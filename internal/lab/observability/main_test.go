package main

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9/logging"

	"github.com/holdfast-go/holdfast/internal/lab/shop"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) {
	logging.Disable() // of go-redis, whose server is away in the exercises
	code := testenv.Run(m)
	shop.Remove()
	os.Exit(code)
}

// folder is where the files are kept.
const folder = "../../../examples/operator/observability"

func TestFiles(t *testing.T) {
	t.Parallel()
	want, err := generated()
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range want {
		got, err := os.ReadFile(filepath.Join(folder, name))
		if err != nil {
			t.Error(err)
			continue
		}
		if !bytes.Equal(got, text) {
			t.Errorf("%s is not what is generated now: go run ./internal/lab/observability", name)
		}
	}
}

// Each alert has a runbook, and each runbook an alert.
func TestRunbooks(t *testing.T) {
	t.Parallel()
	paths, err := filepath.Glob(filepath.Join(folder, "runbooks", "*.md"))
	if err != nil {
		t.Fatal(err)
	}
	var named []string
	for _, a := range alerts {
		named = append(named, a.name)
	}
	for _, path := range paths {
		name := strings.TrimSuffix(filepath.Base(path), ".md")
		at := slices.Index(named, name)
		if at < 0 {
			t.Errorf("%s is of no alert", path)
			continue
		}
		named = slices.Delete(named, at, at+1)
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, heading := range []string{"# " + name + "\n", "## What it means\n", "## How to look\n", "## How to mend\n", "## A false alarm\n"} {
			if !strings.Contains("\n"+string(text), "\n"+heading) {
				t.Errorf("%s has no heading %q", path, strings.TrimSpace(heading))
			}
		}
	}
	if len(named) > 0 {
		t.Errorf("no runbook for %v", named)
	}
}

// Each alert is tested to fire and to stay silent.
func TestExamples(t *testing.T) {
	t.Parallel()
	for _, a := range alerts {
		fires, silent := 0, 0
		for _, e := range a.examples {
			if len(e.fires) > 0 {
				fires++
			} else {
				silent++
			}
		}
		if fires == 0 || silent == 0 {
			t.Errorf("%s: %d examples fire, and %d do not; want one of each", a.name, fires, silent)
		}
	}
}
