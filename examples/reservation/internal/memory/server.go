package memory

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"
)

// Wire is what lies between the shop and the servers that the fakes stand for. Everything that a server is
// asked passes it, but what is asked inside a transaction and the steps of a consumer, which
// NewConsumer's fault is asked about.
type Wire interface {
	// Call asks a server for a step by do, and returns do's error or one of its own. It may call do once, not
	// at all, or, where a step may come twice, such as StepPublish, twice. It is called from many goroutines.
	Call(ctx context.Context, server, step string, do func() error) error
	// Lease is how long a lease of d, by the clock of whoever asks for it, lasts by the server's.
	Lease(ctx context.Context, d time.Duration) time.Duration
}

// The servers.
const (
	PostgresServer = "postgres"
	RedisServer    = "redis"
	RabbitMQServer = "rabbitmq"
)

// The steps. A transaction is one call, in which each attempt makes one at its begin and one before its COMMIT;
// their errors fail the attempt.
const (
	StepTransaction = "transaction"
	StepBegin       = "begin"
	StepEnd         = "end"
	StepClaim       = "claim"
	StepRenew       = "renew"
	StepSettle      = "settle"
	StepKey         = "key"
	StepKeyExtend   = "key extend"
	StepKeyComplete = "key complete"
	StepKeyRelease  = "key release"
	StepLimit       = "limit"
	StepRefund      = "refund"
	StepPublish     = "publish"
)

// Server is a server that the fakes stand for. Switched off, it answers like one that is gone. Its methods may be
// called from any goroutine.
type Server struct {
	name string
	off  atomic.Bool
}

// Name is what the server is called.
func (s *Server) Name() string { return s.name }

// Switch switches it on or off.
func (s *Server) Switch(on bool) { s.off.Store(!on) }

// Off tells whether it is switched off.
func (s *Server) Off() bool { return s.off.Load() }

// Ready returns nil while it is on.
func (s *Server) Ready(context.Context) error {
	if s.Off() {
		return fmt.Errorf("memory: %s is switched off", s.name)
	}
	return nil
}

// Call implements Wire: a server that is switched off is not reached. Transactions find that out at their begin.
func (d *Demo) Call(ctx context.Context, server, step string, do func() error) error {
	for _, s := range d.Servers() {
		if s.name == server && step != StepTransaction && s.Off() {
			return s.Ready(ctx)
		}
	}
	return do()
}

// Lease implements Wire: all clocks are the same.
func (d *Demo) Lease(_ context.Context, lease time.Duration) time.Duration { return lease }
