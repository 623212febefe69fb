package testenv

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/strict"
)

// leakPatience is how long goroutines may take to end. The test of Run shortens it.
var leakPatience = Patience

// Run runs a package's tests and returns the exit code for os.Exit:
//
//	func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }
//
// The code is 1 if goroutines that the tests started are still there long after the last test. An
// interrupt ends the private servers before the process.
func Run(m *testing.M) int {
	running.Store(true)
	strict.On = true
	before := goroutines()
	stop := closeOnSignal()
	defer stop()
	code := m.Run()
	if code != 0 {
		return code // a failed test may have left goroutines
	}
	if left := leaked(before, leakPatience); len(left) > 0 {
		fmt.Printf("%d goroutines left behind by the tests:\n\n%s\n", len(left), strings.Join(left, "\n\n"))
		return 1
	}
	return 0
}

var running atomic.Bool

// Running reports whether this process runs tests of this repository under Run.
func Running() bool { return running.Load() }

func closeOnSignal() (stop func()) {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	done := make(chan struct{})
	go func() {
		select {
		case <-done:
		case <-signals:
			if err := live.closeAll(); err != nil {
				fmt.Println(err)
			}
			os.Exit(130)
		}
	}()
	return func() {
		signal.Stop(signals)
		close(done)
	}
}

// leaked returns the stacks of new goroutines that do not end in time.
func leaked(before map[string]string, patience time.Duration) []string {
	http.DefaultClient.CloseIdleConnections()
	deadline := time.Now().Add(patience) // timing: it is Patience, and shorter in the test of Run
	for {
		var left []string
		for id, stack := range goroutines() {
			if _, old := before[id]; !old && !expected(stack) {
				left = append(left, stack)
			}
		}
		if len(left) == 0 || time.Now().After(deadline) {
			slices.Sort(left)
			return left
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// goroutines returns all stacks by the goroutine's name, as in "goroutine 12".
func goroutines() map[string]string {
	buf := make([]byte, 1<<20)
	for {
		n := runtime.Stack(buf, true)
		if n < len(buf) {
			buf = buf[:n]
			break
		}
		buf = make([]byte, 2*len(buf))
	}
	stacks := map[string]string{}
	for stack := range strings.SplitSeq(strings.TrimSpace(string(buf)), "\n\n") {
		name, _, _ := strings.Cut(stack, " [")
		stacks[name] = stack
	}
	return stacks
}

// expected reports whether a goroutine belongs to the test runner itself.
func expected(stack string) bool {
	for _, owner := range []string{
		"holdfast/internal/testenv.closeOnSignal",
		"os/signal.loop",
		"os/signal.signal_recv",
		"runtime.ensureSigM",
		"testing.(*M).startAlarm",
		"runtime/pprof.profileWriter",
	} {
		if strings.Contains(stack, owner) {
			return true
		}
	}
	return false
}

// live are the servers that this process must end before it exits.
var live = registry{servers: map[*Server]bool{}}

type registry struct {
	mu      sync.Mutex
	servers map[*Server]bool
	ending  bool
}

// add returns false if it is too late for a new server.
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
