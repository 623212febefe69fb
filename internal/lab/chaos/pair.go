package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// postgresSettings keep the log of changes small enough for a small disk.
var postgresSettings = []string{"-c", "max_wal_size=128MB", "-c", "wal_keep_size=64MB", "-c", "autovacuum_naptime=5s"}

// diskSize is that of a server's own disk, where one can be mounted.
const diskSize = "768m"

// pair is a primary and its standby, under an address that moves from one to the other as a virtual IP does.
type pair struct {
	s    *system
	spec testenv.Spec
	// clock is the file that sets the clock of both, "" where it cannot be set.
	clock   string
	address *testenv.Proxy
	// replication is the way of the standby to its primary.
	replication *testenv.Proxy

	mu               sync.Mutex
	primary, standby *testenv.Server
	disk             string           // of the primary, "" where it has none of its own
	spare            string           // that of the standby
	followers        []*testenv.Proxy // what moves with the address
}

// openPair starts a primary and its standby.
func (s *system) openPair(ctx context.Context, spec testenv.Spec, clocks bool) (*pair, error) {
	p := &pair{s: s, spec: spec}
	if clocks {
		if err := p.openClock(); err != nil {
			return p, err
		}
	}
	var err error
	if p.primary, p.disk, err = p.launch(ctx, p.spec); err != nil {
		return p, err
	}
	if p.address, err = s.openLink(p.primary.URL()); err != nil {
		return p, err
	}
	if p.replication, err = s.openLink(p.primary.URL()); err != nil {
		return p, err
	}
	p.follow(p.address)
	return p, p.addStandby(ctx)
}

// launch starts a server on a disk of its own.
func (p *pair) launch(ctx context.Context, spec testenv.Spec) (*testenv.Server, string, error) {
	var disk string
	if spec.Kind == testenv.Postgres && canMount() {
		var err error
		if disk, err = p.s.mount(); err != nil {
			return nil, "", err
		}
		spec.Dir = disk
	} else {
		spec.Dir = p.s.dir
	}
	server, err := testenv.LaunchSpec(ctx, spec)
	if err != nil {
		return nil, "", err
	}
	p.s.atEnd(server.Close)
	return server, disk, nil
}

// addStandby starts a standby of the primary of now.
func (p *pair) addStandby(ctx context.Context) error {
	p.replication.Cut()
	if err := p.replication.Retarget(p.primary.URL()); err != nil {
		return err
	}
	p.replication.Heal()
	spec := p.spec
	spec.Follows = p.replication.URL()
	standby, disk, err := p.launch(ctx, spec)
	if err != nil {
		return fmt.Errorf("standby: %w", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.standby, p.spare = standby, disk
	return nil
}

// follow has a link go wherever the address goes.
func (p *pair) follow(link *testenv.Proxy) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.followers = append(p.followers, link)
}

// failOver makes a primary of the standby, once the primary is dead, and moves the address. It returns the
// server that was the primary; there is no standby then.
func (p *pair) failOver(ctx context.Context) (old *testenv.Server, err error) {
	p.replication.Cut()
	if err := p.standby.Promote(ctx); err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	old = p.primary
	p.primary, p.standby, p.disk, p.spare = p.standby, nil, p.spare, ""
	var errs []error
	for _, link := range p.followers {
		errs = append(errs, link.Retarget(p.primary.URL()))
		link.CutConnections()
	}
	return old, errors.Join(errs...)
}

// server is the primary of now.
func (p *pair) server() *testenv.Server {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.primary
}

// follower is the standby of now.
func (p *pair) follower() *testenv.Server {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.standby
}

// canMount reports whether disks can be mounted here.
func canMount() bool { return os.Geteuid() == 0 && mountTemporary != nil }
