package testenv

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"runtime"
	"strings"
	"sync"
)

// Ports are taken from below the range that systems use for outgoing
// connections: a port from inside it may be occupied by some client while its
// server is down, and a client dialling it may even connect to itself.
const (
	firstPort = 16000
	lastPort  = 25600
)

var reserved = struct {
	sync.Mutex
	ports map[int]net.Listener // kept open: nil where the system has none
}{ports: map[int]net.Listener{}}

// FreePort returns a loopback port nobody listens on, and never the same one twice.
func FreePort() (int, error) {
	for range 1000 {
		port := firstPort + rand.IntN(lastPort-firstPort)
		if !reserve(port) {
			continue
		}
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			continue
		}
		return port, l.Close()
	}
	return 0, errors.New("testenv: no free port")
}

// reserve reports whether the port is this process's from now on. Other tests must not take it
// while its server is down: that one could not start again, or they would be taken for it. On
// Linux the name of an abstract socket says so to other processes, until this one ends.
func reserve(port int) bool {
	reserved.Lock()
	defer reserved.Unlock()
	if _, taken := reserved.ports[port]; taken {
		return false
	}
	var l net.Listener
	if runtime.GOOS == "linux" {
		var err error
		if l, err = net.Listen("unix", fmt.Sprintf("@holdfast-port-%d", port)); err != nil {
			return false
		}
	}
	reserved.ports[port] = l
	return true
}

// portTaken reports whether a server could not start because another process
// was faster in taking its port.
func portTaken(err error) bool {
	text := strings.ToLower(err.Error())
	return strings.Contains(text, "in use") || strings.Contains(text, "eaddrinuse")
}
