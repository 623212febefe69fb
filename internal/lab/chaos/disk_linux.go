package main

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
)

// mountTemporary mounts a small disk in memory.
var mountTemporary = func(dir string) error {
	return syscall.Mount("tmpfs", dir, "tmpfs", 0, "mode=755,size="+diskSize)
}

// mount makes a small disk, which lasts as long as the system, and returns its path.
func (s *system) mount() (string, error) {
	dir, err := os.MkdirTemp(s.dir, "disk-")
	if err != nil {
		return "", err
	}
	if err := mountTemporary(dir); err != nil {
		return "", err
	}
	s.atEnd(func() error { return syscall.Unmount(dir, syscall.MNT_DETACH) })
	return dir, nil
}

func ballast(disk string) string { return filepath.Join(disk, "ballast") }

// fill uses up all space on a disk.
func fill(disk string) error {
	file, err := os.Create(ballast(disk))
	if err != nil {
		return err
	}
	defer file.Close()
	var at int64
	for block := int64(1 << 20); block >= 4<<10; {
		switch err := syscall.Fallocate(int(file.Fd()), 0, at, block); {
		case err == nil:
			at += block
		case errors.Is(err, syscall.ENOSPC):
			block /= 2
		case errors.Is(err, syscall.EINTR):
		default:
			return err
		}
	}
	return nil
}

// relieve frees the space again.
func relieve(disk string) error { return os.Remove(ballast(disk)) }
