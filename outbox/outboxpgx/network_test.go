package outboxpgx_test

import (
	"context"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
)

// The network between relays and Postgres fails in every way at moments of its own choosing, lost
// replies to COMMIT included.
func TestNetworkFaults(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "breaks the network for seconds")
	direct := pgtest.New(t)
	proxy := testenv.NewProxy(t, direct.Config().ConnString())
	f := setupOn(t, direct, outboxpgx.Config{})
	far, err := outboxpgx.New(pgtest.Pool(t, proxy.URL(), 10), outboxpgx.Config{})
	must(t, err)

	const keys, n = 40, 100
	f.write(t, keyed(keys, n)...)
	publisher := outboxtest.NewPublisher()
	publisher.Latency(2 * time.Millisecond)
	var relays []*outbox.Relay
	for range 2 {
		relay, err := outbox.NewRelay(far, publisher, outbox.RelayConfig{
			BatchSize: 40, PollInterval: 20 * time.Millisecond, PublishTimeout: 500 * time.Millisecond,
			LeaseTTL: time.Second, ShutdownTimeout: 2 * time.Second, Logger: quiet,
		})
		must(t, err)
		relays = append(relays, relay)
	}
	stop := run(t, relays...)
	defer stop()
	for _, outage := range []func(){proxy.DropReplies, proxy.Cut, proxy.Pause, proxy.DropReplies} {
		progress(t, publisher, 200, keys*n)
		proxy.CutConnections() // noticed or not
		progress(t, publisher, 200, keys*n)
		outage()
		until(t, "a relay has not noticed the outage", func() bool {
			return relays[0].Ready(t.Context()) != nil && relays[1].Ready(t.Context()) != nil
		})
		proxy.Heal()
	}
	f.untilEmpty(t, testenv.Patience)
	stop()
	t.Logf("%d duplicates", checkLedger(t, publisher.Received(), keys, n))
}

// progress waits until n more messages have arrived, or all.
func progress(t *testing.T, p *outboxtest.Publisher, n, all int) {
	t.Helper()
	untilReceived(t, p, min(len(p.Received())+n, all))
}

// A claim whose COMMIT took effect and whose reply was lost holds lanes for nobody. The next claim of
// the Store gives them back, and nothing is under suspicion.
func TestClaimWithLostReplyIsGivenBack(t *testing.T) {
	t.Parallel()
	direct := pgtest.New(t)
	proxy := testenv.NewProxy(t, direct.Config().ConnString())
	f := setupOn(t, direct, outboxpgx.Config{})
	far, err := outboxpgx.New(pgtest.Pool(t, proxy.URL(), 1), outboxpgx.Config{})
	must(t, err)
	far.Claims(driver.Lanes, 0)
	far.SlowClaims() // so that both claims send the same, which is prepared by then
	f.write(t, keyed(20, 2)...)
	req := driver.Claim{Limit: 500, Lease: time.Minute}
	whole, err := far.Claim(t.Context(), req)
	must(t, err)
	_, err = far.Settle(t.Context(), whole, nil)
	must(t, err)

	leased := func() (n int) {
		must(t, direct.QueryRow(t.Context(), `SELECT count(*) FROM holdfast_outbox_lanes WHERE token IS NOT NULL`).Scan(&n))
		return n
	}
	proxy.DropReplies()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
	defer cancel()
	go func() {
		for ctx.Err() == nil && leased() == 0 {
			time.Sleep(5 * time.Millisecond)
		}
		cancel()
	}()
	if b, err := far.Claim(ctx, req); err == nil {
		t.Fatalf("claimed %d messages without a reply", len(b.Messages))
	}
	proxy.Heal()
	if leased() == 0 {
		t.Fatal("the claim has not taken effect")
	}
	again, err := far.Claim(t.Context(), req)
	must(t, err)
	if len(again.Messages) != len(whole.Messages) || again.Suspect {
		t.Errorf("claimed %d, suspect %v, want all %d", len(again.Messages), again.Suspect, len(whole.Messages))
	}
}
