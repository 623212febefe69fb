package testenv

import (
	"errors"
	"maps"
	"slices"
	"sync"
)

// live are the servers this process must end before it does.
var live = registry{servers: map[*Server]bool{}}

type registry struct {
	mu      sync.Mutex
	servers map[*Server]bool
	ending  bool
}

// add reports false when it is too late for a new server.
func (r *registry) add(s *Server) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.ending {
		r.servers[s] = true
	}
	return !r.ending
}

func (r *registry) remove(s *Server) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.servers, s)
}

func (r *registry) closeAll() error {
	r.mu.Lock()
	r.ending = true
	servers := slices.Collect(maps.Keys(r.servers))
	r.mu.Unlock()
	var errs []error
	for _, s := range servers {
		errs = append(errs, s.Close())
	}
	return errors.Join(errs...)
}
