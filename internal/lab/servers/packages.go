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

// tools are the programs that tests start by themselves, by their Debian packages.
var tools = []struct {
	aptPackage string
	nightly    bool // no test of an ordinary run starts it
	installed  func() bool
}{
	{"pgbouncer", false, testenv.PgBouncerInstalled},
	{"prometheus", true, testenv.PrometheusInstalled},
	{"chromium", true, func() bool { return browser() != "" }},
	{"curl", false, func() bool { _, err := exec.LookPath("curl"); return err == nil }},
}

// getTools installs the tools that are missing. A failure is only reported: tests without their tool
// are skipped, or fail where nothing may be missing.
func getTools(ctx context.Context) {
	if !apt.CanInstall() {
		return
	}
	var missing []string
	for _, tool := range tools {
		if !tool.installed() && (!tool.nightly || os.Getenv(testenv.NightlyVar) == "1") {
			missing = append(missing, tool.aptPackage)
		}
	}
	if len(missing) == 0 {
		return
	}
	fmt.Fprintln(os.Stderr, "servers: apt-get installs", strings.Join(missing, ", "))
	if err := apt.Install(ctx, missing...); err != nil {
		fmt.Fprintf(os.Stderr, "servers: no %s: %v\n", strings.Join(missing, ", "), err)
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
