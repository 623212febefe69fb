// Package shop runs the reservation example as processes, for tests and commands of other packages. They call Remove
// at their end.
//
// timing: its processes serve nightly tests and commands.
package shop

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
)

const example = "github.com/holdfast-go/holdfast/examples/reservation"

// dir holds the binaries.
var dir = filepath.Join(os.TempDir(), fmt.Sprintf("holdfast-shop-%d", os.Getpid()))

// Binary builds the shop, once in a process, and returns its path.
var Binary = sync.OnceValues(func() (string, error) { return Build(context.Background(), example) })

// Build builds a command of this repository and returns its path.
func Build(ctx context.Context, pkg string) (string, error) {
	path := filepath.Join(dir, filepath.Base(pkg))
	if out, err := exec.CommandContext(ctx, "go", "build", "-buildvcs=false", "-o", path, pkg).CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	return path, nil
}

// ErrNoCommit says that this clone does not have a commit: a shallow one has no history.
var ErrNoCommit = errors.New("not in this clone (git fetch --unshallow gets the whole history)")

// Commit names a commit in short, as git does. It fails with ErrNoCommit.
func Commit(ctx context.Context, rev string) (string, error) {
	out, err := exec.CommandContext(ctx, "git", "rev-parse", "--short", "--verify", "--quiet", rev+"^{commit}").Output()
	if err != nil {
		return "", fmt.Errorf("commit %s: %w", rev, ErrNoCommit)
	}
	return strings.TrimSpace(string(out)), nil
}

// BinaryOf builds the shop of a commit, once in a process, and returns its path. It fails with ErrNoCommit where
// there is none.
func BinaryOf(ctx context.Context, rev string) (string, error) {
	name, err := Commit(ctx, rev)
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "reservation-"+name)
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	source := path + "-source"
	defer os.RemoveAll(source)
	if err := checkOut(ctx, name, source); err != nil {
		return "", err
	}
	build := exec.CommandContext(ctx, "go", "build", "-buildvcs=false", "-o", path, "./examples/reservation")
	build.Dir = source
	build.Env = append(os.Environ(), "GOWORK="+filepath.Join(source, "go.work"))
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build of commit %s: %w\n%s", name, err, out)
	}
	return path, nil
}

// checkOut writes the files of a commit into a new folder.
func checkOut(ctx context.Context, rev, folder string) error {
	root, err := exec.CommandContext(ctx, "git", "rev-parse", "--show-toplevel").Output()
	if err != nil {
		return fmt.Errorf("git rev-parse: %w", err)
	}
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	packed := folder + ".tar"
	defer os.Remove(packed)
	archive := exec.CommandContext(ctx, "git", "-C", strings.TrimSpace(string(root)), "archive", "-o", packed, rev)
	if out, err := archive.CombinedOutput(); err != nil {
		return fmt.Errorf("git archive: %s", bytes.TrimSpace(out))
	}
	if out, err := exec.CommandContext(ctx, "tar", "-x", "-C", folder, "-f", packed).CombinedOutput(); err != nil {
		return fmt.Errorf("tar: %s", bytes.TrimSpace(out))
	}
	return nil
}

// Remove removes the binaries that were built.
func Remove() { _ = os.RemoveAll(dir) }
