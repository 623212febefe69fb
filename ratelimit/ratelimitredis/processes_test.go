package ratelimitredis_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
)

// The variables that make this test binary one of many processes.
const (
	childURL    = "HOLDFAST_RATELIMIT_CHILD_URL"
	childLength = "HOLDFAST_RATELIMIT_CHILD_LENGTH"
	childID     = "HOLDFAST_RATELIMIT_CHILD_ID"
)

var (
	contended = ratelimit.Limit{Name: "contended", Max: 100, Window: 2 * time.Second}
	perDay    = ratelimit.Limit{Name: "day", Max: 100, Window: day}
	smooth    = ratelimit.Limit{Name: "smooth", Max: 100, Window: 2 * time.Second, Algorithm: ratelimit.TokenBucket, Burst: 20}
)

// tally is what one limit did in one millisecond of the server's time.
type tally struct{ allowed, denied int64 }

// Many processes charge the same limits; every one of their decisions must be
// what the arithmetic says about all that was admitted.
func TestProcesses(t *testing.T) {
	processes, length := 8, 3*time.Second
	if testenv.Rounds(t) > 0 {
		processes, length = 50, 20*time.Second
	}
	server := testenv.Private(t, testenv.Redis)
	tallies := runProcesses(t, processes, "TestProcessOfMany", childURL+"="+server.URL(), childLength+"="+length.String())
	for _, limit := range []ratelimit.Limit{contended, perDay, smooth} {
		checkTally(t, limit, tallies[limit.Name])
	}
}

// runProcesses runs a test of this binary in many processes, with these variables, and adds up their tallies.
func runProcesses(t *testing.T, processes int, test string, env ...string) map[string]map[int64]tally {
	t.Helper()
	var mu sync.Mutex
	all := map[string]map[int64]tally{}
	var wg sync.WaitGroup
	for id := range processes {
		wg.Go(func() {
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+test+"$", "-test.count=1")
			cmd.Env = append(append(os.Environ(), env...), childID+"="+strconv.Itoa(id))
			cmd.Stderr = os.Stderr
			out, err := cmd.StdoutPipe()
			if err == nil {
				err = cmd.Start()
			}
			if err != nil {
				t.Error(err)
				return
			}
			read(t, out, &mu, all)
			if err := cmd.Wait(); err != nil {
				t.Errorf("process %d: %v", id, err)
			}
		})
	}
	wg.Wait()
	return all
}

func read(t *testing.T, out io.Reader, mu *sync.Mutex, all map[string]map[int64]tally) {
	t.Helper()
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		var name string
		var at int64
		var n tally
		if _, err := fmt.Sscanf(lines.Text(), "tally %s %d %d %d", &name, &at, &n.allowed, &n.denied); err != nil {
			continue // the test runner's own lines
		}
		mu.Lock()
		if all[name] == nil {
			all[name] = map[int64]tally{}
		}
		sum := all[name][at]
		all[name][at] = tally{sum.allowed + n.allowed, sum.denied + n.denied}
		mu.Unlock()
	}
	if err := lines.Err(); err != nil {
		t.Error(err)
	}
}

// checkTally goes through the milliseconds in order: what was admitted up to the
// end of one must fit, and where something was denied not one unit more.
func checkTally(t *testing.T, limit ratelimit.Limit, byTime map[int64]tally) {
	t.Helper()
	times := sortedTimes(byTime)
	w := limit.Window.Milliseconds()
	windows := map[int64]int64{}
	missing, since := int64(0), int64(0)
	allowed, denied := int64(0), int64(0)
	for _, at := range times {
		n := byTime[at]
		allowed, denied = allowed+n.allowed, denied+n.denied
		free := int64(0) // in units times the window
		if limit.Algorithm == ratelimit.TokenBucket {
			missing = max(0, missing-(at-since)*limit.Max) + n.allowed*w
			since = at
			free = limit.Burst*w - missing
		} else {
			windows[at/w] += n.allowed
			free = limit.Max*w - windows[at/w]*w - windows[at/w-1]*(w-at%w)
		}
		if free < 0 {
			t.Fatalf("%s: at %d more was admitted than the limit has: %d too much", limit.Name, at, -free/w+1)
		}
		if n.denied > 0 && free >= w {
			t.Fatalf("%s: at %d %d were denied although %d were free", limit.Name, at, n.denied, free/w)
		}
	}
	t.Logf("%s: %d admitted, %d denied, exactly as the arithmetic says", limit.Name, allowed, denied)
	if denied == 0 || limit == perDay && allowed != limit.Max && times[0]/w == times[len(times)-1]/w {
		t.Errorf("%s: %d admitted, %d denied", limit.Name, allowed, denied)
	}
}

func sortedTimes(byTime map[int64]tally) []int64 { return slices.Sorted(maps.Keys(byTime)) }

// TestProcessOfMany is one of the processes of TestProcesses.
func TestProcessOfMany(t *testing.T) {
	url := os.Getenv(childURL)
	if url == "" {
		return // not a process of many
	}
	length, err := time.ParseDuration(os.Getenv(childLength))
	if err != nil {
		t.Fatal(err)
	}
	l := open(t, redistest.Client(t, url), ratelimitredis.Config{DenyCache: -1, Timeout: patient})
	write(t, chargeInTurns(t, l, []ratelimit.Limit{contended, perDay, smooth}, length))
}

// chargeInTurns charges the limits from some goroutines for so long.
func chargeInTurns(t *testing.T, l ratelimit.Limiter, limits []ratelimit.Limit, length time.Duration) map[string]map[int64]tally {
	t.Helper()
	counts := map[string]map[int64]tally{}
	for _, limit := range limits {
		counts[limit.Name] = map[int64]tally{}
	}
	var mu sync.Mutex
	var wg sync.WaitGroup
	end := time.Now().Add(length)
	for g := range 4 {
		wg.Go(func() {
			for n := g; time.Now().Before(end); n++ {
				limit := limits[n%len(limits)]
				d, err := l.Allow(t.Context(), ratelimit.Charge{Limit: limit})
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				sum := counts[limit.Name][d.At.UnixMilli()]
				if d.Allowed {
					sum.allowed++
				} else {
					sum.denied++
				}
				counts[limit.Name][d.At.UnixMilli()] = sum
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return counts
}

// write is for read.
func write(t *testing.T, counts map[string]map[int64]tally) {
	t.Helper()
	w := bufio.NewWriter(os.Stdout)
	for name, byTime := range counts {
		for at, n := range byTime {
			fmt.Fprintf(w, "tally %s %d %d %d\n", name, at, n.allowed, n.denied)
		}
	}
	if err := w.Flush(); err != nil {
		t.Fatal(err)
	}
}

// While the server is killed, paused and restarted, no caller waits longer than
// the timeout, the policy decides, and what the server decided stays within the
// limit, counted anew after each loss of its memory.
func TestFaults(t *testing.T) {
	faults := 3
	if n := testenv.Rounds(t); n > 0 {
		faults = max(3, n/5)
	}
	const timeout, slack = 100 * time.Millisecond, time.Second
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(2, seed))
	server := testenv.Private(t, testenv.Redis)
	l := open(t, redistest.Client(t, server.URL()), ratelimitredis.Config{
		Timeout: timeout, FailOpen: true,
		DenyCache: -1, // once the limit is used up, remembered denials would hide the faults for the rest of the day
		Logger:    slog.New(slog.DiscardHandler),
	}).Probing(100 * time.Millisecond)
	limit := ratelimit.Limit{Name: "user", Max: 100, Window: day}
	var metered, fellBack, slowest, late atomic.Int64
	leave := crowd(t, func(ctx context.Context) {
		start := time.Now()
		twin := time.AfterFunc(timeout, func() { raise(&late, time.Since(start)-timeout) }) // how late the machine itself is
		d, err := l.Allow(ctx, ratelimit.Charge{Limit: limit})
		took := time.Since(start)
		twin.Stop()
		switch {
		case ctx.Err() != nil:
		case err != nil:
			t.Error(err)
		case d.Fallback:
			fellBack.Add(1)
		case d.Allowed:
			metered.Add(1)
		}
		raise(&slowest, took)
	})
	testenv.Eventually(t, func() error {
		// The account and not the count of the admitted: a call that runs into its timeout may be charged.
		d, err := l.Peek(t.Context(), ratelimit.Charge{Limit: limit})
		if err == nil && d.Limits()[0].Remaining > 0 {
			err = fmt.Errorf("%d units left", d.Limits()[0].Remaining)
		}
		return err
	})
	losses := int64(1)
	for range faults {
		var err error
		if random.IntN(2) == 0 {
			err = errors.Join(server.Pause(), runloop.Sleep(t.Context(), 500*time.Millisecond), server.Resume())
		} else {
			losses++
			err = errors.Join(server.Kill(), runloop.Sleep(t.Context(), 500*time.Millisecond), server.Start(t.Context()))
		}
		if err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, func() error {
			_, err := l.Peek(t.Context(), ratelimit.Charge{Limit: limit})
			return err
		})
	}
	leave()
	t.Logf("%d metered over %d memories, %d by the policy, slowest call %v, latest timer %v late",
		metered.Load(), losses, fellBack.Load(), time.Duration(slowest.Load()), time.Duration(late.Load()))
	if metered.Load() > losses*limit.Max {
		t.Errorf("%d were admitted by a server that lost its memory %d times, with a limit of %d", metered.Load(), losses-1, limit.Max)
	}
	if fellBack.Load() == 0 {
		t.Error("no fault was felt")
	}
	if limit := timeout + slack + time.Duration(late.Load()); time.Duration(slowest.Load()) > limit {
		t.Errorf("a call took %v, want at most %v", time.Duration(slowest.Load()), limit)
	}
}

// raise sets most to a value that is higher.
func raise[T ~int64](most *atomic.Int64, to T) {
	for old := most.Load(); int64(to) > old && !most.CompareAndSwap(old, int64(to)); old = most.Load() {
	}
}
