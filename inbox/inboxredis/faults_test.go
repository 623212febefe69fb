package inboxredis_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestRedisDown(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.Redis)
	client := redistest.Client(t, server.URL())
	var log bytes.Buffer
	runs, breakIt := 0, false
	p := newProcessor(t, client, inboxredis.ProcessorConfig{Logger: slog.New(slog.NewTextHandler(&log, nil))}, func(context.Context, conformance.Event) error {
		runs++
		if breakIt {
			return server.Kill()
		}
		return nil
	})
	if err := process(t, p, event()); err != nil {
		t.Fatal(err)
	}
	breakIt = true
	if err := process(t, p, event()); err != nil {
		t.Errorf("a message whose effect was taken: %v", err)
	}
	if !strings.Contains(log.String(), "a copy may take effect") {
		t.Errorf("log = %s", log.String())
	}
	err := process(t, p, event())
	if f := driver.Classify(err); !errors.Is(err, driver.ErrUnavailable) || f.Counted || runs != 2 {
		t.Errorf("%v classified %+v after %d runs", err, f, runs)
	}
	breakIt = false
	if err := server.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, func() error { return process(t, p, event()) })
}

func TestCheck(t *testing.T) {
	t.Parallel()
	for policy, want := range map[string]string{"noeviction": "", "allkeys-lru": "may evict the marks"} {
		t.Run(policy, func(t *testing.T) {
			t.Parallel()
			server := testenv.Private(t, testenv.Redis, "--maxmemory", "100mb", "--maxmemory-policy", policy)
			p := newProcessor(t, redistest.Client(t, server.URL()), inboxredis.ProcessorConfig{}, succeed)
			err := p.Check(t.Context())
			if want == "" && err != nil {
				t.Errorf("Check: %v", err)
			}
			if _, mends := errors.AsType[interface {
				error
				Mend() string
			}](err); want != "" && (!mends || !strings.Contains(err.Error(), want)) {
				t.Errorf("Check: %v, want a finding with %q", err, want)
			}
		})
	}
}
