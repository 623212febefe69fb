package main_test

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// TestReadyOfRoles takes the broker away, which the api does not need, and then the database.
func TestReadyOfRoles(t *testing.T) {
	t.Parallel()
	direct := newServices(t)
	postgres, redis, rabbit := testenv.NewProxy(t, direct.databaseURL), testenv.NewProxy(t, direct.redisURL), testenv.NewProxy(t, direct.amqpURL)
	s := services{postgres.URL(), redis.URL(), rabbit.URL()}
	roles := map[string]*client{}
	for _, role := range []string{"api", "relay", "consumer", "sweeper"} {
		p := start(t, s.env(), "-backend=services", "-role="+role)
		awaitReady(t, p.url)
		roles[role] = newClient(t, p.url)
	}

	rabbit.Cut()
	awaitUnready(t, roles["relay"])
	awaitUnready(t, roles["consumer"])
	awaitReady(t, roles["api"].url)
	awaitReady(t, roles["sweeper"].url)
	rabbit.Heal()

	postgres.Pause()
	for _, c := range roles {
		awaitUnready(t, c)
	}
	postgres.Resume()
	redis.Cut()
	awaitUnready(t, roles["api"])
	for _, role := range []string{"relay", "consumer", "sweeper"} {
		awaitReady(t, roles[role].url)
	}
	redis.Heal()
	awaitReady(t, roles["api"].url)
}

// TestReadyWhenNoRequestGetsThrough has requests wait for a lock with every connection that serves requests.
func TestReadyWhenNoRequestGetsThrough(t *testing.T) {
	t.Parallel()
	s := newServices(t)
	api := start(t, s.env(), "-backend=services", "-role=api")
	c := newClient(t, api.url)
	awaitReady(t, c.url)
	conn, release := hold(t, s, "lock table events in access exclusive mode")
	var crowd sync.WaitGroup
	for range 20 {
		crowd.Go(func() { _, _ = c.tryPost(newUser(), newKey(), "/api/events", `{"name":"Rush","seats":1}`) })
	}
	awaitBlocked(t, s, conn, 16)
	awaitUnready(t, c)
	release()
	crowd.Wait()
	awaitReady(t, c.url)
}

func TestOpsAddress(t *testing.T) {
	t.Parallel()
	shop := start(t, nil, "-ops-addr=127.0.0.1:0")
	var ops string
	testenv.Eventually(t, func() error {
		if _, after, ok := strings.Cut(shop.stdout.String(), "operators see "); ok {
			ops, _, _ = strings.Cut(after, "\n")
		}
		if ops == "" {
			return fmt.Errorf("it says %q", shop.stdout)
		}
		return nil
	})
	customer, operator := newClient(t, shop.url), newClient(t, ops)
	awaitReady(t, ops)
	operator.get("/metrics").wants(http.StatusOK, "")
	operator.get("/api/events").wants(http.StatusNotFound, "NOT_FOUND")
	customer.get("/api/events").wants(http.StatusOK, "")
	for _, path := range []string{"/readyz", "/metrics", "/healthz"} {
		customer.get(path).wants(http.StatusNotFound, "NOT_FOUND")
	}
	shop.stop()
}

// TestReadsOnSilentConnections reads while every connection to the database is open and never answers again.
func TestReadsOnSilentConnections(t *testing.T) {
	t.Parallel()
	s := newServices(t)
	postgres := testenv.NewProxy(t, s.databaseURL)
	api := start(t, services{postgres.URL(), s.redisURL, s.amqpURL}.env(), "-backend=services", "-role=api")
	c := newClient(t, api.url)
	awaitReady(t, c.url)
	event := c.newEvent(`{"name":"Hall","seats":10}`)
	read := func() {
		var crowd sync.WaitGroup
		for _, path := range []string{"", "/stats"} {
			for range 10 {
				crowd.Go(func() {
					began := time.Now()
					reply, err := c.tryGet("/api/events/" + event + path)
					if took := time.Since(began); err != nil || reply.status != http.StatusOK || took > 40*time.Second {
						t.Errorf("GET %s after %v: %d, %v", path, took, reply.status, err)
					}
				})
			}
		}
		crowd.Wait()
	}
	read() // opens connections
	postgres.SilenceConnections()
	read()
}
