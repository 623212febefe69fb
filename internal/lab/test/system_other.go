//go:build !linux

package main

import (
	"syscall"
	"time"
)

func dieWithParent() *syscall.SysProcAttr { return nil }

// cpuTime returns 0: only Linux reports the CPU time of a running process.
func cpuTime(int) time.Duration { return 0 }

// inMemory returns no variables: the tests' files stay on the disk.
func inMemory(string) []string { return nil }
