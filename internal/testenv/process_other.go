//go:build !linux

package testenv

import "syscall"

// dieWithParent can do nothing here: only Linux ends a child with its parent.
func dieWithParent(*syscall.SysProcAttr) {}
