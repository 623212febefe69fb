package main

import (
	"bytes"
	"context"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/lab/backlog"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

const (
	idleRelay    = "holdfast, relay that polls"
	idleListener = "holdfast, relay that listens"
	// idleLength is how long an idle relay is watched: some of its looks, which are 5 s apart.
	idleLength = 30 * time.Second
	// idleWarmUp is how long it may open connections and prepare statements before.
	idleWarmUp = 7 * time.Second
)

// benchIdle counts the round trips to Postgres of a relay that has nothing to do, with default
// settings: whatever is written to a socket and then answered, a batch of statements being one. The
// pool's own pings, of every connection that was idle for a second, are counted apart. Pruning is left out:
// it takes six round trips, once a minute, which fall into some runs and not into others.
func benchIdle(ctx context.Context, b *bench) {
	d := newStore(ctx, b)
	watch := func(listen bool) func(context.Context, time.Duration) sample {
		return func(ctx context.Context, length time.Duration) sample {
			if length < b.length {
				return sample{0, 0} // a warm-up
			}
			return d.idleTrips(ctx, listen)
		}
	}
	r := b.measure(ctx, table{
		title:      "outbox, nothing to do",
		columns:    []column{{name: "round trips/s", decimals: 2}, {name: "pings of the pool/s", decimals: 2}},
		prepare:    d.reset,
		contenders: []contender{{idleRelay, watch(false)}, {idleListener, watch(true)}},
	})
	b.atMost(1, r.column(idleRelay, 0), "round trips per second when idle, without the pool's pings, "+idleRelay)
	b.atMost(0.5, r.column(idleListener, 0), "round trips per second when idle, without the pool's pings, "+idleListener)
}

func (d *drain) idleTrips(ctx context.Context, listen bool) sample {
	var queries, pings trips
	cfg := d.pool.Config()
	dial := cfg.ConnConfig.DialFunc
	cfg.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		return &countedConn{Conn: conn, queries: &queries, pings: &pings}, err
	}
	pool := must(pgxpool.NewWithConfig(ctx, cfg))
	defer pool.Close()
	store := must(outboxpgx.New(pool, outboxpgx.Config{PollOnly: !listen, PruneInterval: -1, Logger: quiet}))
	relay := must(outbox.NewRelay(store, backlog.Confirms{}, outbox.RelayConfig{Logger: quiet}))
	ctx, cancel := context.WithTimeout(ctx, idleWarmUp+idleLength)
	defer cancel()
	stop := beside(ctx, relay.Run)
	time.Sleep(idleWarmUp)
	queries.reset()
	pings.reset()
	<-ctx.Done()
	check(stop())
	return sample{queries.rate(), pings.rate()}
}

// trips counts requests.
type trips struct{ atomic.Int64 }

func (t *trips) note() { t.Add(1) }

func (t *trips) reset() { t.Store(0) }

// rate is that of idleLength.
func (t *trips) rate() float64 { return float64(t.Load()) / idleLength.Seconds() }

// countedConn counts the first write after an answer.
type countedConn struct {
	net.Conn
	queries, pings *trips

	mu     sync.Mutex
	asking bool
}

func (c *countedConn) Write(p []byte) (int, error) {
	c.mu.Lock()
	if !c.asking && bytes.Contains(p, []byte("-- ping")) { // as pgx.Conn.Ping sends it
		c.pings.note()
	} else if !c.asking {
		c.queries.note()
	}
	c.asking = true
	c.mu.Unlock()
	return c.Conn.Write(p)
}

func (c *countedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.mu.Lock()
	c.asking = c.asking && n == 0
	c.mu.Unlock()
	return n, err
}
