package testenv

import "syscall"

// dieWithParent has the kernel kill the child when the thread that started it ends.
func dieWithParent(attr *syscall.SysProcAttr) { attr.Pdeathsig = syscall.SIGKILL }
