package memory

import (
	"context"
	"fmt"
	"sync/atomic"
)

// Server is a server that the fakes stand for. Switched off, it answers like one that is gone. Its methods may be
// called from any goroutine.
type Server struct {
	name string
	off  atomic.Bool
}

// Name is what the server is called.
func (s *Server) Name() string { return s.name }

// Switch switches it on or off.
func (s *Server) Switch(on bool) { s.off.Store(!on) }

// Off tells whether it is switched off.
func (s *Server) Off() bool { return s.off.Load() }

// Ready returns nil while it is on.
func (s *Server) Ready(context.Context) error {
	if s.Off() {
		return fmt.Errorf("memory: %s is switched off", s.name)
	}
	return nil
}
