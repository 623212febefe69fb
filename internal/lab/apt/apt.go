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
	return install(ctx, "apt-get", policyFile, packages)
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
