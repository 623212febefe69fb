package main

import (
	"os"
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// TestPlaces finds the place of each bug in the code. It fails if the list is outdated.
func TestPlaces(t *testing.T) {
	t.Parallel()
	root, err := repository()
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, b := range bugs {
		if _, err := b.changed(root); err != nil {
			t.Errorf("%s: %v", b.name, err)
		}
		if names[b.name] || b.old == b.new {
			t.Errorf("%s: a name twice, or no change", b.name)
		}
		names[b.name] = true
	}
}
