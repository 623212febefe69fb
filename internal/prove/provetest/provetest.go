// Package provetest has helpers for the tests of the Prove functions.
package provetest

import (
	"fmt"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/internal/prove"
)

// recorder is a TB that records errors instead of failing.
type recorder struct {
	testing.TB
	errors []string
}

func (r *recorder) Errorf(format string, args ...any) {
	r.errors = append(r.errors, fmt.Sprintf(format, args...))
}

// Caught fails unless run reports one error that contains all of these texts.
func Caught(t testing.TB, run func(t prove.TB), want ...string) {
	t.Helper()
	r := &recorder{TB: t}
	run(r)
	if len(r.errors) != 1 {
		t.Fatalf("%d errors, want 1: %q", len(r.errors), r.errors)
	}
	t.Log(r.errors[0])
	for _, text := range want {
		if !strings.Contains(r.errors[0], text) {
			t.Errorf("the error does not contain %q", text)
		}
	}
}
