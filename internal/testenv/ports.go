package testenv

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
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
	ports map[int]bool
}{ports: map[int]bool{}}

// freePort returns a loopback port nobody listens on, and never the same one twice.
func freePort() (int, error) {
	reserved.Lock()
	defer reserved.Unlock()
	for range 1000 {
		port := firstPort + rand.IntN(lastPort-firstPort)
		if reserved.ports[port] {
			continue
		}
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			continue
		}
		if err := l.Close(); err != nil {
			return 0, err
		}
		reserved.ports[port] = true
		return port, nil
	}
	return 0, errors.New("testenv: no free port")
}

// portTaken reports whether a server could not start because another process
// was faster in taking its port.
func portTaken(err error) bool {
	text := strings.ToLower(err.Error())
	return strings.Contains(text, "in use") || strings.Contains(text, "eaddrinuse")
}
