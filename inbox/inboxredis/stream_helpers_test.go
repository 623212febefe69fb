package inboxredis_test

import (
	"context"
	"flag"
	"log/slog"
	"os"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// open begins a session with a window. It is not closed: that is the test's.
func open(t *testing.T, source driver.Source, window int) driver.Session {
	t.Helper()
	s, err := source.Open(t.Context())
	noError(t, err)
	noError(t, s.Start(t.Context(), window))
	return s
}

// receive takes so many messages.
func receive(t *testing.T, s driver.Session, n int) (all []driver.Delivery) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
	defer cancel()
	for len(all) < n {
		ds, err := s.Receive(ctx, n-len(all))
		if err != nil {
			t.Fatalf("%d of %d messages: %v", len(all), n, err)
		}
		all = append(all, ds...)
	}
	return all
}

// running has a source at work until the test ends.
func running(t *testing.T, source driver.Source) driver.Source {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		source.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
	testenv.Eventually(t, func() error { return source.Ready(t.Context()) })
	return source
}

// newSource returns a source of the fixture's group.
func newSource(t *testing.T, client redis.UniversalClient, cfg inboxredis.Config) driver.Source {
	t.Helper()
	cfg.Group, cfg.Name, cfg.Logger = groupName, groupName, slog.New(slog.DiscardHandler)
	s, _, err := inboxredis.NewSource(client, stream, cfg)
	noError(t, err)
	return s
}

// The tests wait for servers that are silent more than they compute, so eight run at once.
func TestMain(m *testing.M) {
	if err := flag.Set("test.parallel", "8"); err != nil {
		panic(err)
	}
	os.Exit(testenv.Run(m))
}

func noError(t *testing.T, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}
