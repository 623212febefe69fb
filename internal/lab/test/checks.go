package main

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"go/format"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
)

// checkProc fails on Linux without a mounted /proc: the tests' servers need it, and so does
// finding and ending their processes.
func checkProc(dir string) error {
	if runtime.GOOS != "linux" {
		return nil
	}
	if _, err := os.Stat(filepath.Join(dir, "self")); err != nil {
		return fmt.Errorf("%w: a mounted %s (mount -t proc proc /proc)", errUnusable, dir)
	}
	return nil
}

// certificates reports whether this machine trusts anyone's certificates.
func certificates() bool {
	pool, err := x509.SystemCertPool()
	return err == nil && !pool.Equal(x509.NewCertPool())
}

// checkFormat names the Go files below dir that gofmt would change.
func checkFormat(dir string) error {
	var wrong []string
	err := walk(dir, func(path string) error {
		if filepath.Ext(path) != ".go" {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		formatted, err := format.Source(text)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		if !bytes.Equal(text, formatted) {
			wrong = append(wrong, path)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if len(wrong) > 0 {
		return fmt.Errorf("not formatted by gofmt: %s", strings.Join(wrong, " "))
	}
	return nil
}

// sums returns the content of the files below dir that the go command maintains.
func sums(dir string) (map[string]string, error) {
	found := map[string]string{}
	err := walk(dir, func(path string) error {
		switch filepath.Base(path) {
		case "go.mod", "go.sum", "go.work", "go.work.sum":
			text, err := os.ReadFile(path)
			found[path] = string(text)
			return err
		}
		return nil
	})
	return found, err
}

// checkSums fails if compiling has changed a file that the go command maintains, or if an earlier run did and the change
// is in no commit yet. It looks at go.work.sum only for the latter: the go command changes no other file by itself.
func checkSums(ctx context.Context, before map[string]string) error {
	after, err := sums(".")
	if err != nil {
		return err
	}
	if err := unchanged(before, after); err != nil {
		return err
	}
	var exit *exec.ExitError
	err = exec.CommandContext(ctx, "git", "diff", "--quiet", "--", "go.work.sum").Run()
	if errors.As(err, &exit) && exit.ExitCode() == 1 { // other codes: not a clone, or no git
		return errors.New("go.work.sum has changed: commit it (git add go.work.sum)")
	}
	return nil
}

// unchanged names the files that differ. The change is left where it is, ready to be committed.
func unchanged(before, after map[string]string) error {
	var changed []string
	for _, path := range slices.Sorted(maps.Keys(after)) {
		if text, ok := before[path]; !ok || text != after[path] {
			changed = append(changed, path)
		}
	}
	if len(changed) > 0 {
		return fmt.Errorf("the go command has changed %s: commit the change (git add %[1]s)", strings.Join(changed, " "))
	}
	return nil
}

// walk calls visit with each file below dir, without hidden folders.
func walk(dir string, visit func(path string) error) error {
	return filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() {
			if path != dir && strings.HasPrefix(entry.Name(), ".") {
				return fs.SkipDir
			}
			return nil
		}
		return visit(path)
	})
}
