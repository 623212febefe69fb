package ratelimitredis_test

import (
	"context"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
)

// leasedLimits are used up by a few processes on any machine, all but the last.
var leasedLimits = []ratelimit.Limit{
	{Name: "contended", Max: 1000, Window: 2 * time.Second},
	{Name: "second", Max: 500, Window: time.Second, Algorithm: ratelimit.FixedWindow},
	{Name: "day", Max: 5_000_000, Window: day, Algorithm: ratelimit.FixedWindow},
}

// Many processes take units of the same limits ahead: what they spend stays within the limits at every
// millisecond of the server's clock. One of them ends without giving back what it holds; the account
// says what that was, and it is no more than is promised.
func TestLeasedProcesses(t *testing.T) {
	processes, length := 6, 3*time.Second
	if testenv.Rounds(t) > 0 {
		processes, length = 50, 20*time.Second
	}
	server := testenv.Private(t, testenv.Redis)
	tallies := runProcesses(t, processes, "TestLeasedProcessOfMany", childURL+"="+server.URL(), childLength+"="+length.String())
	for _, limit := range leasedLimits {
		checkWithin(t, limit, tallies[limit.Name])
	}
	limit := leasedLimits[2]
	spent := int64(0)
	for _, n := range tallies[limit.Name] {
		spent += n.allowed
	}
	l := open(t, redistest.Client(t, server.URL()), ratelimitredis.Config{})
	d, err := l.Peek(t.Context(), ratelimit.Charge{Limit: limit, Cost: limit.Max})
	if err != nil {
		t.Fatal(err)
	}
	stranded := limit.Max - d.Limits()[0].Remaining - spent
	t.Logf("%d spent, %d stranded", spent, stranded)
	if stranded < 0 || stranded > 2*limit.Max/100 {
		t.Errorf("%d units are stranded, want at most %d", stranded, 2*limit.Max/100)
	}
}

// checkWithin goes through the milliseconds in order: what was admitted up to the end of one must fit.
func checkWithin(t *testing.T, limit ratelimit.Limit, byTime map[int64]tally) {
	t.Helper()
	w := limit.Window.Milliseconds()
	windows := map[int64]int64{}
	allowed, denied := int64(0), int64(0)
	for _, at := range sortedTimes(byTime) {
		n := byTime[at]
		allowed, denied = allowed+n.allowed, denied+n.denied
		windows[at/w] += n.allowed
		used := windows[at/w] * w
		if limit.Algorithm == ratelimit.SlidingWindow {
			used += windows[at/w-1] * (w - at%w)
		}
		if used > limit.Max*w {
			t.Fatalf("%s: at %d more was admitted than the limit has: %d too much", limit.Name, at, (used-limit.Max*w)/w+1)
		}
	}
	t.Logf("%s: %d admitted, %d denied", limit.Name, allowed, denied)
	if limit != leasedLimits[2] && (denied == 0 || allowed < limit.Max*9/10) {
		t.Errorf("%s: %d admitted, %d denied", limit.Name, allowed, denied)
	}
}

// TestLeasedProcessOfMany is one of the processes of TestLeasedProcesses.
func TestLeasedProcessOfMany(t *testing.T) {
	url := os.Getenv(childURL)
	if url == "" {
		return // not a process of many
	}
	length, err := time.ParseDuration(os.Getenv(childLength))
	if err != nil {
		t.Fatal(err)
	}
	id, err := strconv.Atoi(os.Getenv(childID))
	if err != nil {
		t.Fatal(err)
	}
	l, err := ratelimit.NewLeased(open(t, redistest.Client(t, url), ratelimitredis.Config{DenyCache: -1, Timeout: patient}), ratelimit.LeasedConfig{})
	if err != nil {
		t.Fatal(err)
	}
	run, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- l.Run(run) }()
	write(t, chargeInTurns(t, l, leasedLimits, length))
	if id == 0 {
		os.Exit(0) // with all that it holds
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
