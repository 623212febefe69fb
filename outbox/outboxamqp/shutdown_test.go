package outboxamqp_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// A broker that falls silent with messages on their way does not hold up the end of a relay.
func TestRelayEndsInTimeWithoutAnswers(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "measures the end of Run")
	b := amqptest.New(t)
	b.Queue(t, "q", nil)
	proxy := testenv.NewProxy(t, b.URL)
	quiet := slog.New(slog.DiscardHandler)
	const limit, forever = 3 * time.Second, 2 * testenv.Patience
	p := newPublisher(t, through(proxy), outboxamqp.Config{Timeout: forever, Logger: quiet})
	store := outboxtest.New()
	relay, err := outbox.NewRelay(store, p, outbox.RelayConfig{ShutdownTimeout: limit, PublishTimeout: forever, Logger: quiet})
	must(t, err)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- relay.Run(ctx) }()
	testenv.Eventually(t, func() error { return relay.Ready(t.Context()) })
	// The publisher gives up a connection that has been silent for some 7 s, and allows a second more for each MiB
	// on its way. The silence begins with the messages, so it lasts for longer than the limit.
	proxy.SilenceOn(testenv.Silence{On: "11111111"})
	msgs := slices.Repeat([]outbox.Message{{Name: "q", Body: bytes.Repeat([]byte("1"), 1<<20)}}, 60)
	if err := txretrytest.New(txretrytest.Config{}).Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		return store.Write(ctx, tx, msgs...)
	}); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, func() error {
		if used, _ := p.Window(); used == 0 {
			return errors.New("nothing is on its way")
		}
		return nil
	})
	proxy.Pause() // for another connection, too
	start := time.Now()
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if took := time.Since(start); took > limit+3*time.Second {
		t.Errorf("Run took %v to end, %v are allowed", took, limit)
	}
}
