package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/hosts"
	"github.com/holdfast-go/holdfast/internal/lab/shop"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// endsWithin is what a shop promises, and a little more.
const endsWithin = 60 * time.Second

// role is a process of the shop on a host.
type role struct {
	name  string
	url   string
	cmd   *exec.Cmd
	log   tail
	ended <-chan error
}

// startRole starts a process of the shop, which may still have to wait for its servers then.
func startRole(host *hosts.Host, port int, env []string, name string, flags ...string) (*role, error) {
	path, err := shop.Binary()
	if err != nil {
		return nil, err
	}
	address := fmt.Sprintf("%s:%d", host.Address, port)
	r := &role{name: name + " on " + host.Name, url: "http://" + address}
	r.cmd = exec.Command(path, append([]string{
		"-backend=services", "-role=" + name, "-addr=" + address, "-user-limit=1000000000", "-global-limit=1000000000",
	}, flags...)...)
	r.cmd.Env, r.cmd.Stdout, r.cmd.Stderr = append(os.Environ(), env...), io.Discard, &r.log
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // an interrupt at the terminal is for this process
	testenv.DieWithParent(r.cmd.SysProcAttr)
	r.ended, err = host.Start(r.cmd)
	return r, err
}

// stop asks the process to end, and wants it to do so well.
func (r *role) stop() error {
	_ = r.cmd.Process.Signal(syscall.SIGTERM) // it may have ended, as Wait tells
	late := time.AfterFunc(endsWithin, func() { _ = r.cmd.Process.Kill() })
	defer late.Stop()
	if err := <-r.ended; err != nil {
		return fmt.Errorf("%s: %w; it said:\n%s", r.name, err, &r.log)
	}
	return nil
}

func stopAll(roles []*role) error {
	errs := make([]error, len(roles))
	var stopping sync.WaitGroup
	for i, r := range roles {
		stopping.Go(func() { errs[i] = r.stop() })
	}
	stopping.Wait()
	return errors.Join(errs...)
}

// readyClient gives a process as long for an answer as a load balancer would.
var readyClient = &http.Client{Timeout: 3 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}

func (r *role) ready(ctx context.Context) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.url+"/readyz", nil)
	if err != nil {
		return err
	}
	resp, err := readyClient.Do(req)
	if err != nil {
		return fmt.Errorf("%s: %w", r.name, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", r.name, resp.Status)
	}
	return nil
}

// allReady asks all at once.
func allReady(ctx context.Context, roles []*role) error {
	errs := make([]error, len(roles))
	var asking sync.WaitGroup
	for i, r := range roles {
		asking.Go(func() { errs[i] = r.ready(ctx) })
	}
	asking.Wait()
	return errors.Join(errs...)
}

// tail keeps the end of what a process says.
type tail struct {
	mu   sync.Mutex
	text []byte
}

// longestTail is how much of it: an outage may cost many lines.
const longestTail = 8000

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, p...)
	if n := len(t.text); n > longestTail {
		t.text = bytes.Clone(t.text[n-longestTail:])
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.text)
}

// env is how the roles of an app host learn of the servers: their own PgBouncer, and all nodes of the clusters.
func (h *house) env(app int) []string {
	var brokers, more []string
	for _, s := range h.rabbit {
		brokers = append(brokers, s.URL())
	}
	for _, s := range h.redis[1:] {
		more = append(more, "addr="+addressOf(s.URL()))
	}
	return shop.Servers{
		Database: h.poolers[app].URL() + "&default_query_exec_mode=exec",
		Redis:    "redis://" + addressOf(h.redis[0].URL()) + "?" + strings.Join(more, "&"),
		Broker:   strings.Join(brokers, ","),
	}.Env()
}

// addressOf is the host and port of a server's URL.
func addressOf(rawURL string) string {
	_, after, _ := strings.Cut(rawURL, "://")
	if _, host, ok := strings.Cut(after, "@"); ok {
		after = host
	}
	address, _, _ := strings.Cut(after, "/")
	return address
}
