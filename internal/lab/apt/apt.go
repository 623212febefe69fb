// Package apt installs Debian packages for the commands of the lab, as root on Debian and Ubuntu, without starting
// their daemons.
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

// policyFile is asked by Debian's package scripts whether they may start a daemon.
const policyFile = "/usr/sbin/policy-rc.d"

// CanInstall reports whether packages can be installed here without a question: as root, by apt-get.
func CanInstall() bool {
	_, err := exec.LookPath("apt-get")
	return err == nil && os.Geteuid() == 0
}

// Install installs packages and what they depend on.
func Install(ctx context.Context, packages ...string) error {
	return install(ctx, []string{"apt-get"}, policyFile, packages)
}

// below runs a command in the system in a folder. Scripts of packages want /proc, which is mounted in a namespace
// that ends with them.
const below = `mount -t proc proc "$0/proc" && exec chroot "$0" "$@"`

// InstallBelow installs into the system in the folder root, which needs the rights of root.
func InstallBelow(ctx context.Context, root string, packages ...string) error {
	return install(ctx, []string{"unshare", "--mount", "sh", "-c", below, root, "apt-get"}, filepath.Join(root, policyFile), packages)
}

// Missing returns those of the packages that are not installed here.
func Missing(packages ...string) (missing []string) {
	for _, name := range packages {
		out, err := exec.Command("dpkg-query", "-W", "-f=${Status}", name).Output()
		if err != nil || !bytes.HasSuffix(out, []byte(" installed")) {
			missing = append(missing, name)
		}
	}
	return missing
}

func install(ctx context.Context, apt []string, policy string, packages []string) (err error) {
	restore, err := denyDaemons(policy)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, restore()) }()
	for _, args := range [][]string{
		{"update", "-q"},
		append([]string{"install", "-q", "-y", "--no-install-recommends"}, packages...),
	} {
		cmd := exec.CommandContext(ctx, apt[0], slices.Concat(apt[1:], args)...)
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
