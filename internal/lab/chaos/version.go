package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// commit names a commit in short, "unknown" where there is no history.
func commit(rev string) string {
	out, err := exec.Command("git", "rev-parse", "--short", rev+"^{commit}").Output()
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(out))
}

// previous builds the shop of another commit and returns where it is, and how to remove it.
func previous(ctx context.Context, rev string) (binary string, remove func(), err error) {
	dir, err := os.MkdirTemp("", "holdfast-previous-")
	if err != nil {
		return "", func() {}, err
	}
	remove = func() { _ = os.RemoveAll(dir) }
	binary = filepath.Join(dir, "reservation")
	if err := buildAt(ctx, rev, dir, binary); err != nil {
		remove()
		return "", func() {}, fmt.Errorf("no version before this one: %w", err)
	}
	return binary, remove, nil
}

func buildAt(ctx context.Context, rev, dir, binary string) error {
	root, err := exec.CommandContext(ctx, "git", "rev-parse", "--show-toplevel").Output()
	if err != nil {
		return fmt.Errorf("no git history: %w", err)
	}
	packed := dir + ".tar"
	defer os.Remove(packed)
	archive := exec.CommandContext(ctx, "git", "-C", strings.TrimSpace(string(root)), "archive", "-o", packed, rev)
	if out, err := archive.CombinedOutput(); err != nil {
		return fmt.Errorf("git archive: %s", bytes.TrimSpace(out))
	}
	if out, err := exec.CommandContext(ctx, "tar", "-x", "-C", dir, "-f", packed).CombinedOutput(); err != nil {
		return fmt.Errorf("tar: %s", bytes.TrimSpace(out))
	}
	build := exec.CommandContext(ctx, "go", "build", "-buildvcs=false", "-o", binary, "./examples/reservation")
	build.Dir = dir
	build.Env = append(os.Environ(), "GOWORK="+filepath.Join(dir, "go.work"))
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("go build of %s: %w\n%s", rev, err, out)
	}
	return nil
}
