package testenv

import (
	"cmp"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
)

// Host is a machine to the servers on it: a network of its own. The zero Host is this process's network,
// at 127.0.0.1.
type Host struct {
	// Address is where the servers listen and are called, and what nodes of a cluster know each other by.
	Address string

	// Enter moves the thread that calls it into the network. That thread starts a process, and ends then.
	Enter func() error
}

// apart reports whether the host has a network of its own.
func (h Host) apart() bool { return h.Address != "" }

func (h Host) address() string { return cmp.Or(h.Address, "127.0.0.1") }

// at is the address with a port.
func (h Host) at(port int) string { return h.address() + ":" + strconv.Itoa(port) }

// tuple is the address as Erlang writes it.
func (h Host) tuple() string { return "{" + strings.ReplaceAll(h.address(), ".", ",") + "}" }

// run runs a command on the host.
func (h Host) run(cmd *exec.Cmd) (output []byte, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		if h.Enter != nil {
			runtime.LockOSThread() // and never unlocked: the thread belongs to another network now
			if err = h.Enter(); err != nil {
				return
			}
		}
		output, err = cmd.CombinedOutput()
	}()
	<-done
	return output, err
}
