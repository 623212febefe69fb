package testenv

import "syscall"

// DieWithParent makes the kernel kill the child when the thread that started it ends.
func DieWithParent(attr *syscall.SysProcAttr) { attr.Pdeathsig = syscall.SIGKILL }
