// Package debian installs packages, for commands that get what they need by themselves.
package debian

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
)

// policyFile is asked by Debian's package scripts whether they may start a daemon.
const policyFile = "usr/sbin/policy-rc.d"

// Installer runs apt-get.
type Installer struct {
	apt    []string
	policy string
}

// Here installs on this machine. It reports false where that needs a question: not as root, or without apt-get.
func Here() (Installer, bool) {
	apt, err := exec.LookPath("apt-get")
	return Installer{[]string{apt}, "/" + policyFile}, err == nil && os.Geteuid() == 0
}

// Below installs into the system in the folder root, which needs the rights of root.
func Below(root string) Installer {
	return Installer{[]string{"chroot", root, "apt-get"}, filepath.Join(root, policyFile)}
}

// Install installs packages, and starts no daemon of theirs.
func (i Installer) Install(ctx context.Context, packages ...string) (err error) {
	restore, err := denyDaemons(i.policy)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, restore()) }()
	if err := i.run(ctx, "update", "-q"); err != nil {
		return err
	}
	return i.run(ctx, append([]string{"install", "-q", "-y", "--no-install-recommends"}, packages...)...)
}

func (i Installer) run(ctx context.Context, args ...string) error {
	cmd := exec.CommandContext(ctx, i.apt[0], append(i.apt[1:len(i.apt):len(i.apt)], args...)...)
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("apt-get %s: %w\n%s", args[0], err, bytes.TrimSpace(out))
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
