package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"strings"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// policyFile is asked by Debian's package scripts whether they may start a daemon.
const policyFile = "/usr/sbin/policy-rc.d"

// fromPackages installs what is missing, where that takes no question: as root on Debian or Ubuntu.
func fromPackages(ctx context.Context, needs []need, started *closers) ([]string, []need, error) {
	apt, err := exec.LookPath("apt-get")
	if err != nil || os.Geteuid() != 0 {
		return nil, needs, nil
	}
	var packages []string
	for _, n := range needs {
		packages = append(packages, n.aptPackage)
	}
	fmt.Fprintf(os.Stderr, "servers: apt-get installs %s\n", strings.Join(packages, ", "))
	if err := install(ctx, apt, policyFile, packages); err != nil {
		return nil, needs, err
	}
	return fromBinaries(ctx, needs, started)
}

// tools are what tests start by themselves, by their Debian packages.
var tools = []struct {
	aptPackage string
	installed  func() bool
}{
	{"pgbouncer", testenv.PgBouncerInstalled},
	{"prometheus", testenv.PrometheusInstalled},
	{"chromium", func() bool { return browser() != "" }},
	{"curl", func() bool { _, err := exec.LookPath("curl"); return err == nil }},
}

// getTools installs the tools that are missing. Tests without theirs are skipped, or fail where no server may be
// missing, so what goes wrong is no more than said.
func getTools(ctx context.Context) {
	apt, err := exec.LookPath("apt-get")
	if err != nil || os.Geteuid() != 0 {
		return
	}
	for _, tool := range tools {
		if tool.installed() {
			continue
		}
		fmt.Fprintln(os.Stderr, "servers: apt-get installs", tool.aptPackage)
		if err := install(ctx, apt, policyFile, []string{tool.aptPackage}); err != nil {
			fmt.Fprintf(os.Stderr, "servers: no %s: %v\n", tool.aptPackage, err)
		}
	}
}

// browsers are the names under which a Chromium is installed.
var browsers = []string{"chromium", "google-chrome"}

// browser returns the path of an installed Chromium, or nothing.
func browser() string {
	for _, name := range browsers {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	return ""
}

// browserEnv is the environment that names the Chromium, where there is one and nobody has named another.
func browserEnv() []string {
	path := browser()
	if path == "" || os.Getenv(testenv.ChromiumVar) != "" {
		return nil
	}
	return []string{testenv.ChromiumVar + "=" + path}
}

func install(ctx context.Context, apt, policy string, packages []string) (err error) {
	restore, err := denyDaemons(policy)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, restore()) }()
	for _, args := range [][]string{
		{"update", "-q"},
		append([]string{"install", "-q", "-y", "--no-install-recommends"}, packages...),
	} {
		cmd := exec.CommandContext(ctx, apt, args...)
		cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("apt-get %s: %w\n%s", args[0], err, bytes.TrimSpace(out))
		}
	}
	return nil
}

// denyDaemons forbids installations to start what they install, until restore is called.
func denyDaemons(policy string) (restore func() error, err error) {
	before, err := os.ReadFile(policy)
	existed := err == nil
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if err := os.WriteFile(policy, []byte("#!/bin/sh\nexit 101\n"), 0o755); err != nil {
		return nil, err
	}
	return func() error {
		if !existed {
			return os.Remove(policy)
		}
		return os.WriteFile(policy, before, 0o755)
	}, nil
}
