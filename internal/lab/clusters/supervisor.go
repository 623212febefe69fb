package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// supervisor starts a PgBouncer again that has ended by itself, as that of a host does, and counts it: version 1.18
// ends with "server in bad state" when clients cancel statements, which is its issue 822.
type supervisor struct {
	stop func()

	mu      sync.Mutex
	during  string
	crashes []crash
}

// crash is the end of a server that nobody had asked for.
type crash struct{ host, during, said string }

// supervise watches servers on hosts of these names, until stop.
func supervise(ctx context.Context, names []string, servers []*testenv.Server) *supervisor {
	ctx, cancel := context.WithCancel(ctx)
	s := &supervisor{during: "the start"}
	var all sync.WaitGroup
	for i, server := range servers {
		all.Go(func() {
			for runloop.Sleep(ctx, 200*time.Millisecond) == nil {
				if server.Crashed() {
					s.note(names[i], server.Log())
					if err := server.Start(ctx); err != nil && ctx.Err() == nil {
						fmt.Fprintf(os.Stderr, "clusters: %s on %s does not start again: %v\n", server.Kind(), names[i], err)
					}
				}
			}
		})
	}
	s.stop = func() {
		cancel()
		all.Wait()
	}
	return s
}

// note takes a crash, with the last line of the log as what the server said.
func (s *supervisor) note(host, log string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	said := log[strings.LastIndexByte(log, '\n')+1:]
	fmt.Fprintf(os.Stderr, "clusters: PgBouncer on %s has ended by itself: %s\n", host, said)
	s.crashes = append(s.crashes, crash{host, s.during, said})
}

// now tells which fault happens from now on.
func (s *supervisor) now(fault string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.during = fault
}

// all returns what has crashed so far.
func (s *supervisor) all() []crash {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]crash(nil), s.crashes...)
}
