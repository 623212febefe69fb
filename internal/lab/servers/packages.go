package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"

	"github.com/holdfast-go/holdfast/internal/lab/apt"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// fromPackages installs what is missing, where that takes no question: as root on Debian or Ubuntu.
func fromPackages(ctx context.Context, needs []need, started *closers) ([]string, []need, error) {
	if !apt.CanInstall() {
		return nil, needs, nil
	}
	var packages []string
	for _, n := range needs {
		packages = append(packages, n.aptPackage)
	}
	fmt.Fprintf(os.Stderr, "servers: apt-get installs %s\n", strings.Join(packages, ", "))
	if err := apt.Install(ctx, packages...); err != nil {
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
	if !apt.CanInstall() {
		return
	}
	for _, tool := range tools {
		if tool.installed() {
			continue
		}
		fmt.Fprintln(os.Stderr, "servers: apt-get installs", tool.aptPackage)
		if err := apt.Install(ctx, tool.aptPackage); err != nil {
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
