// Package apt installs Debian packages for the commands of the lab, as root on Debian and Ubuntu. It does not start their
// daemons.
package apt

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
)

// policyFile is the script that Debian's package scripts call to find out whether they may start a daemon.
const policyFile = "/usr/sbin/policy-rc.d"

// CanInstall reports whether packages can be installed here without asking: as root, with apt-get.
func CanInstall() bool {
	_, err := exec.LookPath("apt-get")
	return err == nil && os.Geteuid() == 0
}

// Install installs packages and their dependencies.
func Install(ctx context.Context, packages ...string) error {
	return install(ctx, nil, policyFile, commands(packages))
}

// below runs a command in a system below a folder. Package scripts need /proc, which is mounted in a namespace that ends
// with the command.
const below = `mount -t proc proc "$0/proc" && exec chroot "$0" "$@"`

// InstallBelow installs into the system below the folder root. It needs root. If an earlier installation there was killed,
// it repairs that system first.
func InstallBelow(ctx context.Context, root string, packages ...string) error {
	return install(ctx, []string{"unshare", "--mount", "sh", "-c", below, root}, filepath.Join(root, policyFile), append(repairs, commands(packages)...))
}

// repairs fix a system in which an installation was killed. dpkg fails if a package depends on one that was not unpacked;
// then apt-get fetches it.
var repairs = [][]string{
	{"sh", "-c", "dpkg --configure -a || true"},
	{"apt-get", "install", "-q", "-y", "--fix-broken"},
}

func commands(packages []string) [][]string {
	return [][]string{
		{"apt-get", "update", "-q"},
		append([]string{"apt-get", "install", "-q", "-y", "--no-install-recommends"}, packages...),
	}
}

// Missing returns the packages that are not installed here.
func Missing(packages ...string) (missing []string) {
	for _, name := range packages {
		out, err := exec.Command("dpkg-query", "-W", "-f=${Status}", name).Output()
		if err != nil || !bytes.HasSuffix(out, []byte(" installed")) {
			missing = append(missing, name)
		}
	}
	return missing
}

// install runs each command, with the arguments inside in front of it if there are any.
func install(ctx context.Context, inside []string, policy string, commands [][]string) (err error) {
	restore, err := denyDaemons(policy)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, restore()) }()
	for _, command := range commands {
		args := slices.Concat(inside, command)
		cmd := exec.CommandContext(ctx, args[0], args[1:]...)
		cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s %s: %w\n%s", command[0], command[1], err, bytes.TrimSpace(out))
		}
	}
	return nil
}

// denyDaemons prevents installations from starting daemons, until restore is called.
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
