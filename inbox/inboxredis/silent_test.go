package inboxredis_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/internal/silent"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
)

// A call that ends by the client's own timeout must not leave a claim.
func TestClientTimeout_leavesNoClaim(t *testing.T) {
	t.Parallel()
	url := redistest.URL(t)
	synctest.Test(t, func(t *testing.T) {
		server := silent.NewRedis(t, url)
		client := server.Client(t, func(o *redis.Options) { o.ReadTimeout, o.MaxRetries = time.Second, -1 })
		p := newProcessor(t, client, inboxredis.ProcessorConfig{}, func(context.Context, conformance.Event) error { return nil })
		server.SilenceOn(testenv.Silence{On: "processing:", Deliver: true})
		m := event()
		start := time.Now()
		if err := process(t, p, m); err != nil {
			t.Error(err)
		}
		if took := time.Since(start); took != time.Second || server.Silenced() != 1 {
			t.Errorf("took %v, %d connections silent", took, server.Silenced())
		}
	})
}

// A connection that falls silent during a script is abandoned, even by a client without a timeout. No remaining
// claim may block the message.
func TestSilentConnection(t *testing.T) {
	t.Parallel()
	redistest.URL(t) // skips before there are subtests
	for name, silence := range map[string]testenv.Silence{
		"claim":                {On: "processing:"},
		"claim, which arrives": {On: "processing:", Deliver: true},
		"every idle one":       {},
		"mark":                 {On: "done:"},
		"mark, which arrives":  {On: "done:", Deliver: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			silent.BothClients(t, redistest.URL, -1, func(t *testing.T, client *redis.Client, server *silent.Redis) {
				testSilentConnection(t, server, client, silence)
			})
		})
	}
}

func testSilentConnection(t *testing.T, server *silent.Redis, client *redis.Client, silence testenv.Silence) {
	runs := 0
	p := newProcessor(t, client, inboxredis.ProcessorConfig{}, func(context.Context, conformance.Event) error { runs++; return nil })
	if silence == (testenv.Silence{}) {
		silent.Fill(t, client, 8)
		server.SilenceConnections()
	} else {
		server.SilenceOn(silence)
	}
	m := event()
	start := time.Now()
	for {
		err := process(t, p, m)
		if err == nil {
			break
		}
		if f := driver.Classify(err); f.Counted || !errors.Is(err, driver.ErrUnavailable) && !errors.Is(err, inboxredis.ErrInProgress) {
			t.Fatalf("%v classified %+v", err, f)
		}
		time.Sleep(time.Second)
	}
	took := time.Since(start)
	another := silence.On == "" && took == 5*time.Second // a second attempt before the idle ones are closed, and a redelivery
	if took != 2*time.Second && !another {
		t.Errorf("the message took %v", took)
	}
	if err := process(t, p, m); err != nil || runs != 1 {
		t.Errorf("the second delivery: %v after %d runs", err, runs)
	}
}
