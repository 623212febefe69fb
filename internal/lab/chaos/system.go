package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/lab/harness"
	"github.com/holdfast-go/holdfast/internal/lab/harness/audit"
	"github.com/holdfast-go/holdfast/internal/lab/shop"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// roles are the processes of the shop, two of each.
var roles = []string{"api", "api", "relay", "relay", "consumer", "consumer", "sweeper", "sweeper"}

// hold is how long the shop holds a seat.
const hold = 2 * time.Second

// process is one process of the shop, with ways of its own to the servers.
type process struct {
	*shop.Process
	role  string
	links map[testenv.Kind]*testenv.Proxy
}

// system is the shop as processes, on servers of its own.
type system struct {
	dir       string // for the servers and what belongs to them
	binary    string
	db, redis *pair
	broker    *testenv.Server
	processes []*process
	pool      *pgxpool.Pool // of the lab: past the processes' links, to whichever Postgres is the primary

	mu      sync.Mutex
	lost    []audit.Change // committed, and lost by a failover to an asynchronous standby
	strange []error        // what went wrong in the lab's own parts
	endings []func() error
}

// openSystem starts the servers and all processes. With clocks the servers' clocks can be set. It must be closed, also
// after an error.
func openSystem(ctx context.Context, binary string, clocks bool) (*system, error) {
	s := &system{binary: binary}
	dir, err := os.MkdirTemp("", "holdfast-chaos-")
	if err != nil {
		return s, err
	}
	s.dir = dir
	s.atEnd(func() error { return os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil { // Postgres runs as another user
		return s, err
	}
	if err := s.openServers(ctx, clocks); err != nil {
		return s, err
	}
	return s, s.openProcesses(ctx)
}

func (s *system) openServers(ctx context.Context, clocks bool) error {
	var errs [3]error
	var starting sync.WaitGroup
	starting.Go(func() {
		s.db, errs[0] = s.openPair(ctx, testenv.Spec{Kind: testenv.Postgres, Extra: postgresSettings}, clocks)
	})
	starting.Go(func() { s.redis, errs[1] = s.openPair(ctx, testenv.Spec{Kind: testenv.Redis}, clocks) })
	starting.Go(func() {
		s.broker, errs[2] = testenv.Launch(ctx, testenv.RabbitMQ)
		if errs[2] == nil {
			s.atEnd(s.broker.Close)
		}
	})
	starting.Wait()
	return errors.Join(errs[:]...)
}

func (s *system) openProcesses(ctx context.Context) error {
	for i, role := range roles {
		p, err := s.newProcess(role, fmt.Sprintf("%s %d", role, 1+i%2))
		if err != nil {
			return err
		}
		s.processes = append(s.processes, p)
	}
	if err := s.start(s.processes...); err != nil {
		return err
	}
	if err := s.broker.WriteDefinitions(ctx); err != nil {
		return err
	}
	pool, err := pgxpool.New(ctx, s.db.address.URL())
	if err != nil {
		return err
	}
	s.pool = pool
	s.atEnd(func() error {
		pool.Close()
		return nil
	})
	return nil
}

func (s *system) newProcess(role, name string) (*process, error) {
	p := &process{role: role, links: map[testenv.Kind]*testenv.Proxy{}}
	for kind, url := range map[testenv.Kind]string{
		testenv.Postgres: s.db.primary.URL(), testenv.Redis: s.redis.primary.URL(), testenv.RabbitMQ: s.broker.URL(),
	} {
		link, err := s.openLink(url)
		if err != nil {
			return nil, err
		}
		p.links[kind] = link
	}
	s.db.follow(p.links[testenv.Postgres])
	s.redis.follow(p.links[testenv.Redis])
	servers := shop.Servers{Database: p.links[testenv.Postgres].URL(), Redis: p.links[testenv.Redis].URL(), Broker: p.links[testenv.RabbitMQ].URL()}
	p.Process = shop.New(name, servers.Env(), "-backend=services", "-role="+role, "-hold="+hold.String(), "-user-limit="+strconv.Itoa(userLimit), "-global-limit=0")
	s.atEnd(func() error {
		p.Kill()
		return nil
	})
	return p, nil
}

// openLink opens a way to a server that lasts as long as the system.
func (s *system) openLink(url string) (*testenv.Proxy, error) {
	link, err := testenv.OpenProxy(url, func(err error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.strange = append(s.strange, err)
	})
	if err == nil {
		s.atEnd(func() error {
			link.Close()
			return nil
		})
	}
	return link, err
}

// start starts processes and returns when they listen.
func (s *system) start(processes ...*process) error {
	errs := make([]error, len(processes))
	var starting sync.WaitGroup
	for i, p := range processes {
		starting.Go(func() {
			if errs[i] = p.Start(s.binary); errs[i] == nil {
				errs[i] = p.AwaitListening(harness.StartPatience)
			}
		})
	}
	starting.Wait()
	return errors.Join(errs...)
}

// replace starts processes and does not wait for them.
func (s *system) replace(processes ...*process) error {
	for _, p := range processes {
		if err := p.Start(s.binary); err != nil {
			return err
		}
	}
	return nil
}

// apis are the addresses where clients reach the shop.
func (s *system) apis() (urls []string) {
	for _, p := range s.named("api") {
		urls = append(urls, p.URL())
	}
	return urls
}

// named are the processes of a role.
func (s *system) named(role string) []*process {
	var found []*process
	for _, p := range s.processes {
		if p.role == role {
			found = append(found, p)
		}
	}
	return found
}

func (s *system) atEnd(f func() error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.endings = append(s.endings, f)
}

// close ends everything, the last first, and tells what went wrong in the lab's own parts.
func (s *system) close() error {
	s.mu.Lock()
	endings := s.endings
	s.mu.Unlock()
	var errs []error
	for _, end := range slices.Backward(endings) {
		errs = append(errs, end())
	}
	return errors.Join(append(errs, s.strange...)...)
}

// logs writes the end of what everybody has logged into a folder.
func (s *system) logs(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	texts := map[string]string{"postgres": s.db.primary.Log(), "redis": s.redis.primary.Log(), "rabbitmq": s.broker.Log()}
	for _, p := range s.processes {
		texts[p.Name] = p.Log()
	}
	var errs []error
	for name, text := range texts {
		errs = append(errs, os.WriteFile(filepath.Join(dir, name+".log"), []byte(text), 0o644))
	}
	return errors.Join(errs...)
}

// sessions tells what those of the database do.
func (s *system) sessions(ctx context.Context) string {
	rows, _ := s.pool.Query(ctx, `select format('%s %s, blocked by %s, since %s: %s', pid, state,
		pg_blocking_pids(pid), state_change, left(query, 200)) from pg_stat_activity where state <> 'idle' order by state_change`)
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err.Error()
	}
	return strings.Join(lines, "\n")
}
