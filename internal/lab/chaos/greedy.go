package main

import (
	"context"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/harness/audit"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

const (
	// userLimit is the shop's limit for each user and minute. A client that insists throughout a fault stays below it.
	userLimit = 1000
	// greedySenders and greedyPause make 40 requests a second where nothing is slow: more than twice the limit.
	greedySenders = 4
	greedyPause   = 100 * time.Millisecond
	// greedyTimeout is longer than the limiter waits for Redis.
	greedyTimeout = 10 * time.Second
)

// greedy is one user who asks for more than the limit of the shop admits, through all apis, from the beginning of a seed to
// its end. The requests lack an idempotency key. So those that the limiter lets pass are refused right behind it, and cost the
// shop little.
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

// ask sends one request and notes what came of it.
func (g *greedy) ask(ctx context.Context, sender int) {
	apis := g.apis()
	url := apis[sender%len(apis)]
	if url == "" {
		return
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/api/reservations", strings.NewReader("{}"))
	if err != nil {
		return // the address of a process is one
	}
	req.Header.Set("X-Mock-User-Id", "greedy")
	req.Header.Set("Content-Type", "application/json")
	a := audit.Asked{Sent: time.Now()}
	resp, err := g.http.Do(req)
	a.Answered = time.Now()
	if err == nil {
		a.Status = resp.StatusCode
		_, _ = io.Copy(io.Discard, resp.Body) // the answer is its status
		_ = resp.Body.Close()
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.asked = append(g.asked, a)
}

// excuse says that Redis may have lost its counts since some time, so many times.
func (g *greedy) excuse(since time.Time, times int) {
	if times == 0 {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.forgotten = append(g.forgotten, audit.Forgotten{From: since, To: time.Now(), Times: times})
}

// told is everything so far.
func (g *greedy) told() audit.Limit {
	g.mu.Lock()
	defer g.mu.Unlock()
	return audit.Limit{
		Max: userLimit, Window: time.Minute,
		Asked: append([]audit.Asked(nil), g.asked...), Forgotten: append([]audit.Forgotten(nil), g.forgotten...),
	}
}
