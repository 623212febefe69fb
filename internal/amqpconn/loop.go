package amqpconn

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/holdfast-go/holdfast/internal/backoff"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/telemetry"
)

// stable is how long a session must last for its end to count as the first failure again.
const stable = time.Second

// pauses between two sessions: 0.1 s growing to 2 s, spread by half. A pause outlives the fault that
// has caused it, so it is short.
var pauses = backoff.Policy{Base: 100 * time.Millisecond, Max: 2 * time.Second, Jitter: 0.5, JitterAfterCap: true}

// errRefused ends a session over a message that the broker has refused. The next one begins at once.
var errRefused = errors.New("the broker has refused a message")

// LoopConfig says how Loop connects.
type LoopConfig struct {
	Dial    Dial
	Timeout time.Duration // of the dial and of every call
	Logger  *slog.Logger
	// Down receives every failed attempt and every ended session. Optional.
	Down func(err error)
}

// Loop runs session after session, each on a connection of its own that is
// closed afterwards, with a growing pause between them. It returns when ctx is
// cancelled, or when a session returns nil because it has nothing left to do.
// The broker need not be there when it begins.
func Loop(ctx context.Context, cfg LoopConfig, session func(context.Context, *Conn) error) {
	var seldom telemetry.Seldom
	for failures := 0; ctx.Err() == nil; failures++ {
		began := time.Now()
		err := one(ctx, cfg, session)
		if err == nil || ctx.Err() != nil {
			return
		}
		if cfg.Down != nil {
			cfg.Down(err)
		}
		if errors.Is(err, errRefused) {
			failures = -1
			continue
		}
		if time.Since(began) > stable {
			failures = 0
		}
		pause := pauses.Delay(failures, rand.Float64())
		if repeats, ok := seldom.Due(); ok {
			cfg.Logger.WarnContext(ctx, "no session with RabbitMQ", slog.Any("error", err),
				slog.Int("failures", failures+1), slog.Duration("again_in", pause), slog.Int("repeats", repeats))
		}
		if runloop.Sleep(ctx, pause) != nil {
			return
		}
	}
}

func one(ctx context.Context, cfg LoopConfig, session func(context.Context, *Conn) error) error {
	conn, err := Open(ctx, cfg.Dial, cfg.Timeout)
	if err != nil {
		return err
	}
	defer conn.Close()
	return session(ctx, conn)
}
