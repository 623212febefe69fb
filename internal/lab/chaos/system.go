package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
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
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// roles are the processes of the shop, two of each.
var roles = []string{"api", "api", "relay", "relay", "consumer", "consumer", "sweeper", "sweeper"}

// hold is how long the shop holds a seat.
const hold = 2 * time.Second

// process is one process of the shop, with its own links to the servers.
type process struct {
	*shop.Process
	role  string
	links map[testenv.Kind]*testenv.Proxy
}

// system is the shop as processes, on its own servers.
type system struct {
	dir       string // for the servers and their files
	binary    string
	db, redis *pair
	broker    *testenv.Server
	processes []*process
	pool      *pgxpool.Pool // of the lab: bypasses the links, always to the current primary

	mu      sync.Mutex
	lost    []audit.Change // committed, and lost by a failover to an asynchronous standby
	strange []error        // failures of the lab itself
	endings []func() error
}

// openSystem starts the servers and all processes. With clocks, the servers' clocks can be set. The caller must close the
// system, also after an error.
func openSystem(ctx context.Context, binary string, broker testenv.Kind, clocks bool) (*system, error) {
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
	if err := s.openServers(ctx, broker, clocks); err != nil {
		return s, err
	}
	return s, s.openProcesses(ctx)
}

func (s *system) openServers(ctx context.Context, broker testenv.Kind, clocks bool) error {
	var errs [3]error
	var starting sync.WaitGroup
	starting.Go(func() {
		s.db, errs[0] = s.openPair(ctx, testenv.Spec{Kind: testenv.Postgres, Extra: postgresSettings}, clocks)
	})
	starting.Go(func() { s.redis, errs[1] = s.openPair(ctx, testenv.Spec{Kind: testenv.Redis}, clocks) })
	starting.Go(func() {
		s.broker, errs[2] = testenv.Launch(ctx, broker)
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
	if err := s.writeDefinitions(ctx); err != nil {
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

// writeDefinitions makes RabbitMQ keep its queues over a kill. NATS keeps its streams by itself.
func (s *system) writeDefinitions(ctx context.Context) error {
	if s.broker.Kind() != testenv.RabbitMQ {
		return nil
	}
	return s.broker.WriteDefinitions(ctx)
}

func (s *system) observedBroker() harness.Broker {
	if s.broker.Kind() == testenv.NATS {
		return harness.NATS{URL: s.broker.URL()}
	}
	return harness.RabbitMQ{Dial: harness.At(s.broker.URL()), Admin: s.broker.AdminURL}
}

func (s *system) newProcess(role, name string) (*process, error) {
	p := &process{role: role, links: map[testenv.Kind]*testenv.Proxy{}}
	for kind, url := range map[testenv.Kind]string{
		testenv.Postgres: s.db.primary.URL(), testenv.Redis: s.redis.primary.URL(), s.broker.Kind(): s.broker.URL(),
	} {
		link, err := s.openLink(url)
		if err != nil {
			return nil, err
		}
		p.links[kind] = link
	}
	s.db.follow(p.links[testenv.Postgres])
	s.redis.follow(p.links[testenv.Redis])
	servers := shop.Servers{Database: p.links[testenv.Postgres].URL(), Redis: p.links[testenv.Redis].URL(), Broker: p.links[s.broker.Kind()].URL()}
	p.Process = shop.New(name, servers.Env(), "-backend=services", "-broker="+string(s.broker.Kind()), "-role="+role, "-hold="+hold.String(), "-user-limit="+strconv.Itoa(userLimit), "-global-limit=0")
	s.atEnd(func() error {
		p.Kill()
		return nil
	})
	return p, nil
}

// openLink opens a link to a server. It lasts as long as the system.
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

// replace starts processes and does not wait until they listen.
func (s *system) replace(processes ...*process) error {
	for _, p := range processes {
		if err := p.Start(s.binary); err != nil {
			return err
		}
	}
	return nil
}

// apis returns the addresses of the api processes.
func (s *system) apis() (urls []string) {
	for _, p := range s.named("api") {
		urls = append(urls, p.URL())
	}
	return urls
}

// named returns the processes of a role.
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

// close ends everything in reverse order, and returns failures of the lab itself.
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

// logs writes the ends of all logs into a folder.
func (s *system) logs(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	texts := map[string]string{"postgres": s.db.primary.Log(), "redis": s.redis.primary.Log(), string(s.broker.Kind()): s.broker.Log()}
	for _, p := range s.processes {
		texts[p.Name] = p.Log()
	}
	var errs []error
	for name, text := range texts {
		errs = append(errs, os.WriteFile(filepath.Join(dir, name+".log"), []byte(text), 0o644))
	}
	return errors.Join(errs...)
}

// sessions describes the sessions of the database.
func (s *system) sessions(ctx context.Context) string {
	rows, _ := s.pool.Query(ctx, `select format('%s %s, blocked by %s, since %s: %s', pid, state,
		pg_blocking_pids(pid), state_change, left(query, 200)) from pg_stat_activity where state <> 'idle' order by state_change`)
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err.Error()
	}
	return strings.Join(lines, "\n")
}

// postgresSettings keep the log of changes small enough for a small disk.
var postgresSettings = []string{"-c", "max_wal_size=128MB", "-c", "wal_keep_size=64MB", "-c", "autovacuum_naptime=5s"}

// diskSize is the size of a server's own disk, if one can be mounted.
const diskSize = "768m"

// pair is a primary and its standby, under an address that moves from one to the other like a virtual IP.
type pair struct {
	s    *system
	spec testenv.Spec
	// clock is the file that sets the clock of both; "" if it cannot be set.
	clock   string
	address *testenv.Proxy
	// replication is the link from the standby to its primary.
	replication *testenv.Proxy

	mu               sync.Mutex
	primary, standby *testenv.Server
	disk             string           // of the primary, "" if it has no disk of its own
	spare            string           // disk of the standby
	followers        []*testenv.Proxy // links that move with the address
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

// launch starts a server on its own disk.
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

// addStandby starts a standby of the current primary.
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

// follow makes a link move together with the address.
func (p *pair) follow(link *testenv.Proxy) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.followers = append(p.followers, link)
}

// failOver promotes the standby after the primary has died, and moves the address. It returns the old primary. Afterwards
// there is no standby.
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

// server returns the current primary.
func (p *pair) server() *testenv.Server {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.primary
}

// follower returns the current standby.
func (p *pair) follower() *testenv.Server {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.standby
}

// canMount reports whether disks can be mounted here.
func canMount() bool { return os.Geteuid() == 0 && mountTemporary != nil }

const (
	// userLimit is the shop's limit per user and minute. A client that retries throughout a fault stays below it.
	userLimit = 1000
	// greedySenders and greedyPause make 40 requests a second while nothing is slow: more than twice the limit.
	greedySenders = 4
	greedyPause   = 100 * time.Millisecond
	// greedyTimeout is longer than the limiter waits for Redis.
	greedyTimeout = 10 * time.Second
)

// greedy is one user who sends more requests than the limit of the shop allows, through all apis, during the whole seed. The
// requests lack an idempotency key. So a request that passes the limiter is rejected right after it, and costs the shop
// little.
type greedy struct {
	apis func() []string
	http *http.Client
	stop func()

	mu        sync.Mutex
	asked     []audit.Asked
	forgotten []audit.Forgotten
}

func newGreedy(apis func() []string) *greedy {
	return &greedy{apis: apis, http: &http.Client{Timeout: greedyTimeout, Transport: &http.Transport{MaxIdleConnsPerHost: greedySenders}}}
}

// start sends until the returned function is called.
func (g *greedy) start(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	var senders sync.WaitGroup
	for i := range greedySenders {
		senders.Go(func() {
			for runloop.Sleep(ctx, greedyPause) == nil {
				g.ask(ctx, i)
			}
		})
	}
	g.stop = func() {
		cancel()
		senders.Wait()
		g.http.CloseIdleConnections()
	}
}

// ask sends one request and records its answer.
func (g *greedy) ask(ctx context.Context, sender int) {
	apis := g.apis()
	url := apis[sender%len(apis)]
	if url == "" {
		return
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/api/reservations", strings.NewReader("{}"))
	if err != nil {
		return // the address of a process is always valid
	}
	req.Header.Set("X-Mock-User-Id", "greedy")
	req.Header.Set("Content-Type", "application/json")
	a := audit.Asked{Sent: time.Now()}
	resp, err := g.http.Do(req)
	a.Answered = time.Now()
	if err == nil {
		a.Status = resp.StatusCode
		_, _ = io.Copy(io.Discard, resp.Body) // only the status counts
		_ = resp.Body.Close()
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.asked = append(g.asked, a)
}

// excuse records that Redis may have lost its counts since a time, and how many times.
func (g *greedy) excuse(since time.Time, times int) {
	if times == 0 {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.forgotten = append(g.forgotten, audit.Forgotten{From: since, To: time.Now(), Times: times})
}

// told returns the answers so far.
func (g *greedy) told() audit.Limit {
	g.mu.Lock()
	defer g.mu.Unlock()
	return audit.Limit{
		Max: userLimit, Window: time.Minute,
		Asked: append([]audit.Asked(nil), g.asked...), Forgotten: append([]audit.Forgotten(nil), g.forgotten...),
	}
}
