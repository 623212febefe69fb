package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// The build step of the image makes a program without libraries that runs.
func TestContainerfile_builds(t *testing.T) {
	testenv.Nightly(t, "it compiles everything again, without cgo")
	t.Parallel()
	text, err := os.ReadFile("../../Containerfile")
	must(t, err)
	_, step, found := strings.Cut(string(text), "\nRUN ")
	step, _, _ = strings.Cut(step, "\n")
	program := filepath.Join(t.TempDir(), "holdfast")
	build := strings.Replace(step, "-o /holdfast ", "-o "+program+" ", 1)
	if !found || build == step {
		t.Fatalf("the image has no build step: %s", text)
	}
	shell := exec.CommandContext(t.Context(), "sh", "-c", build)
	shell.Dir = "../../../.."
	if out, err := shell.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", build, err, out)
	}
	if out, err := exec.CommandContext(t.Context(), program, "--help").CombinedOutput(); err != nil || !strings.Contains(string(out), "doctor") {
		t.Errorf("it prints %s: %v", out, err)
	}
	if !strings.Contains(string(text), "\nUSER 65532") || !strings.Contains(string(text), "--from=build /holdfast ") {
		t.Errorf("the image runs as root, or lacks the program: %s", text)
	}
}
