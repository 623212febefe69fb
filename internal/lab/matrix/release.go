package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/apt"
)

const (
	mirror = "http://deb.debian.org/debian"
	// script is debootstrap's for every release since stretch. That of a release may be newer than this machine's debootstrap.
	script = "/usr/share/debootstrap/scripts/sid"
	// valkeyFirst is a folder of a release in which Valkey has Redis's name.
	valkeyFirst = "/opt/valkey"
	// stopPatience is how long the suites may take to end their servers.
	stopPatience = time.Minute
)

// runOn runs the suites on the servers of a release, whose system is below root.
func (m machine) runOn(ctx context.Context, r release, root string) ([]outcome, error) {
	var all, more []outcome
	var err, failed error
	var running sync.WaitGroup
	running.Go(func() { all, err = m.runIn(ctx, root, "", postgres, redis, rabbitmq) })
	if slices.Contains(r.packages, "valkey-server") {
		running.Go(func() { more, failed = m.runIn(ctx, root, valkeyFirst+":", redis) })
	}
	running.Wait()
	if err := errors.Join(err, failed); err != nil {
		return nil, fmt.Errorf("%s: %w", r.name, err)
	}
	all = append(all, more...)
	for i := range all {
		all[i].Release = r.name
	}
	return all, nil
}

// prepare makes the system of a release, or brings that of an earlier run up to date.
func (r release) prepare(ctx context.Context) (root string, err error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	root = filepath.Join(cache, "holdfast", "releases", r.name)
	if _, err := os.Stat(root); errors.Is(err, fs.ErrNotExist) {
		if err := debootstrap(ctx, r.name, root); err != nil {
			return "", err
		}
	} else if err != nil {
		return "", err
	}
	settings := filepath.Join(root, "etc/apt/apt.conf.d/late-mirror") // the lists of a release to come are valid for days only
	if err := os.WriteFile(settings, []byte("Acquire::Check-Valid-Until \"false\";\n"), 0o644); err != nil {
		return "", err
	}
	fmt.Fprintln(os.Stderr, "matrix:", r.name, "gets", strings.Join(r.packages, ", "))
	if err := apt.InstallBelow(ctx, root, r.packages...); err != nil {
		return "", err
	}
	if !slices.Contains(r.packages, "valkey-server") {
		return root, nil
	}
	if err := os.MkdirAll(filepath.Join(root, valkeyFirst), 0o755); err != nil {
		return "", err
	}
	err = os.Symlink("/usr/bin/valkey-server", filepath.Join(root, valkeyFirst, "redis-server"))
	if errors.Is(err, fs.ErrExist) {
		err = nil
	}
	return root, err
}

// debootstrap makes a system in root, which appears when it is whole.
func debootstrap(ctx context.Context, name, root string) error {
	if _, err := exec.LookPath("debootstrap"); err != nil {
		if !apt.CanInstall() {
			return errors.New("install debootstrap, and run this as root")
		}
		if err := apt.Install(ctx, "debootstrap"); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(filepath.Dir(root), 0o755); err != nil {
		return err
	}
	fmt.Fprintln(os.Stderr, "matrix: debootstrap", name)
	unfinished := root + ".unfinished"
	if err := os.RemoveAll(unfinished); err != nil {
		return err
	}
	out, err := exec.CommandContext(ctx, "debootstrap", "--variant=minbase", name, unfinished, mirror, script).CombinedOutput()
	if err != nil {
		return fmt.Errorf("debootstrap: %w\n%s", err, out)
	}
	return os.Rename(unfinished, root)
}

// enter runs its arguments behind the "--" inside a system. The mounts are those of a namespace, which end with it.
const enter = `
root=$1; shift
mount -t proc proc "$root/proc"
mkdir -p "$root/dev/shm"
mount -t tmpfs tmpfs "$root/dev/shm"
while [ "$1" != -- ]; do
	mkdir -p "$root$1"
	mount --bind "$1" "$root$1"
	shift
done
shift
cd "$1"
dir=$1; shift
exec chroot "$root" sh -c 'cd "$0" && exec "$@"' "$dir" "$@"`

// runIn runs the suites of some products in the system below root. Path is what comes first in the PATH.
func (m machine) runIn(ctx context.Context, root, path string, products ...string) ([]outcome, error) {
	args := []string{"--mount", "sh", "-ec", enter, "sh", root, m.repository, m.goroot, m.modules, m.builds, "--", m.repository,
		filepath.Join(m.goroot, "bin", "go"), "run", "./internal/lab/matrix", "-inside", strings.Join(products, ",")}
	cmd := exec.CommandContext(ctx, "unshare", args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGINT) } // go run passes none on
	cmd.WaitDelay = stopPatience
	cmd.Stderr = os.Stderr
	cmd.Env = []string{
		"HOME=/root", "LANG=C.UTF-8", "PATH=" + path + filepath.Join(m.goroot, "bin") + ":/usr/sbin:/usr/bin:/sbin:/bin",
		"GOMODCACHE=" + m.modules, "GOCACHE=" + m.builds, "GOFLAGS=-buildvcs=false", "GOTOOLCHAIN=local", "GOPROXY=off",
		"CGO_ENABLED=0", // the release has no C compiler
		"HOLDFAST_REQUIRE_SERVERS=1",
	}
	out, err := cmd.Output()
	if err != nil {
		return nil, err
	}
	var outcomes []outcome
	return outcomes, json.Unmarshal(out, &outcomes)
}
