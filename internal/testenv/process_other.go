//go:build !linux

package testenv

import "syscall"

// DieWithParent does nothing here: only Linux ends a child with its parent.
func DieWithParent(*syscall.SysProcAttr) {}
