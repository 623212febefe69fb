package inboxredis

import (
	"context"
	"crypto/rand"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/internal/redisconn"
)

const (
	// shareEvery is how often a reader looks whether its process may hold one more partition.
	shareEvery = 100 * time.Millisecond
	// leaveTimeout bounds the last word of a process that ends.
	leaveTimeout = time.Second
)

// share bounds how many partitions a process holds: as many as there are for each process, rounded
// up. It only decides who asks for a lease and who gives one back. That no two processes work on one
// partition is the lease's promise, however wrong a share is. The nil share has no bound.
type share struct {
	group *group // of the first partition, whose server knows the processes
	key   string
	run   string // this process
	all   int    // partitions

	mu      sync.Mutex
	most    int  // that this process may hold; 0: the processes were not counted yet
	held    int  // that it holds, or asks for
	passing bool // one of them is to be passed on
}

func newShare(groups []*group) *share {
	return &share{group: groups[0], key: groups[0].keys.processes(len(groups)), run: rand.Text()[:runIDBytes], all: len(groups)}
}

// count tells the server that this process takes part, and learns how many do.
func (s *share) count(ctx context.Context) error {
	n, err := s.group.script(ctx, shareScript, []string{s.key}, s.run, claimIdle.Milliseconds())
	if err != nil {
		return s.group.fault("count the processes", err)
	}
	processes := max(int(n), 1)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.most = (s.all + processes - 1) / processes
	return nil
}

// leave tells the server that this process ends. Where that fails it is counted for a while.
func (s *share) leave(ctx context.Context) {
	_, _ = redisconn.Within(context.WithoutCancel(ctx), leaveTimeout, func(ctx context.Context) (int64, error) {
		return s.group.client.ZRem(ctx, s.key, s.run).Result()
	})
}

// enter counts one more partition, if this process may hold it.
func (s *share) enter() bool {
	if s == nil {
		return true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.held >= s.most {
		return false
	}
	s.held++
	return true
}

// exit counts one partition less.
func (s *share) exit() {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held--
}

// pass reports whether a partition is to be passed on. One at a time is, until passed is called.
func (s *share) pass() bool {
	if s == nil {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.passing || s.held <= s.most {
		return false
	}
	s.passing = true
	return true
}

func (s *share) passed() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.passing = false
}
