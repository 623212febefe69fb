// Package shoptest is the ticket shop in memory, for programs that test the whole shop, such as a simulation.
// It has the handlers, relay, consumer and sweeper of the program, any number of each, over one set of fakes,
// as if each ran in its own process. Calls to the servers pass a Wire, which may delay, reject or lose them.
package shoptest

import (
	"context"
	"log/slog"
	"net/http"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/httpapi"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/memory"
	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// Wire is between the shop and its servers.
type Wire = memory.Wire

// Observer has functions that are called for commits, for messages at the broker and for faults of transactions.
type Observer = memory.Observer

// The servers and the steps of a Wire.
const (
	Postgres = memory.PostgresServer
	Redis    = memory.RedisServer
	RabbitMQ = memory.RabbitMQServer

	StepTransaction = memory.StepTransaction
	StepBegin       = memory.StepBegin
	StepEnd         = memory.StepEnd
	StepClaim       = memory.StepClaim
	StepRenew       = memory.StepRenew
	StepSettle      = memory.StepSettle
	StepKey         = memory.StepKey
	StepKeyExtend   = memory.StepKeyExtend
	StepKeyComplete = memory.StepKeyComplete
	StepKeyRelease  = memory.StepKeyRelease
	StepLimit       = memory.StepLimit
	StepRefund      = memory.StepRefund
	StepPublish     = memory.StepPublish
)

// Config configures Open. Hold and UserLimit are required.
type Config struct {
	// Hold is how long a reservation is held.
	Hold time.Duration
	// UserLimit is the number of POSTs per minute of one user.
	UserLimit int
	// Faults are injected into the attempts of transactions, in this order. Optional.
	Faults []txretrytest.Fault
	// Wire is between the shop and its servers. Default: it passes everything on.
	Wire Wire
	// Observe has functions that are called for commits, messages and faults. Optional.
	Observe Observer
	// NewID makes the ids of events and reservations, lowercase UUIDs. Default: at random.
	NewID func() string
	// MaxCrashes is how many processes in a row may die over one message before it is a dead letter. Default: the
	// default of relays and consumers.
	MaxCrashes int
	// Rand is the random source of all parts. Default: math/rand/v2.
	Rand func() float64
	// Logger is the logger of all parts. Default: slog.Default().
	Logger *slog.Logger
}

// Shop is the shop in memory. Its methods may be called from any goroutine.
type Shop struct {
	parts *memory.Parts
	api   http.Handler
	limit ratelimit.Limit // of each user
}

// Open makes a shop. Its parts do not run yet.
func Open(cfg Config) (*Shop, error) {
	parts, err := memory.Open(memory.Config{
		Faults: cfg.Faults, Wire: cfg.Wire, Observe: cfg.Observe, Rand: cfg.Rand, MaxCrashes: cfg.MaxCrashes, Logger: cfg.Logger,
	})
	if err != nil {
		return nil, err
	}
	if cfg.NewID == nil {
		cfg.NewID = uuid.NewString
	}
	api, err := httpapi.New(httpapi.Config{
		Shop: booking.Shop{Hold: cfg.Hold, NewID: cfg.NewID}, Backend: parts.Shop, Keys: parts.Keys, Limiter: parts.Limiter,
		UserLimit: cfg.UserLimit, Logger: cfg.Logger,
	})
	if err != nil {
		return nil, err
	}
	limit, _ := httpapi.Limits(cfg.UserLimit, 0)
	return &Shop{parts, api, limit}, nil
}

// API serves the shop's requests. Calls to servers get the request's context.
func (s *Shop) API() http.Handler { return s.api }

// Relay returns one more relay.
func (s *Shop) Relay() (*outbox.Relay, error) { return s.parts.NewRelay() }

// Consumer returns one more consumer. fault decides the outcome of each of its steps.
func (s *Shop) Consumer(fault func(inboxtest.Step, *inbox.Message) inboxtest.Outcome) (*inboxtest.Consumer, error) {
	return s.parts.NewConsumer(fault)
}

// Sweeper returns one more sweeper.
func (s *Shop) Sweeper() (*expiry.Sweeper, error) { return s.parts.NewSweeper() }

// Forget deletes all idempotency keys and the charges of these users from Redis.
func (s *Shop) Forget(ctx context.Context, users ...string) error {
	s.parts.Keys.Flush()
	for _, user := range users {
		if err := s.parts.Limiter.Memory.Reset(ctx, ratelimit.Charge{Limit: s.limit, Key: user}); err != nil {
			return err
		}
	}
	return nil
}

// State returns everything that the shop has stored.
func (s *Shop) State(ctx context.Context) (State, error) {
	rows, err := s.parts.Shop.Dump(ctx)
	if err != nil {
		return State{}, err
	}
	depth, err := s.parts.Outbox.Depth(ctx)
	if err != nil {
		return State{}, err
	}
	queue, err := s.parts.Consumer.Stats(ctx)
	if err != nil {
		return State{}, err
	}
	claims, _, err := s.parts.Keys.InFlight(ctx)
	state := State{Outbox: depth.Ready + depth.Parked, Queue: queue.Waiting + queue.Retrying + queue.PutOff, Dead: depth.Dead, Claims: claims}
	for _, n := range queue.Dead {
		state.Dead += n
	}
	state.fill(rows)
	return state, err
}

// State is everything that the shop has stored at one moment.
type State struct {
	Reservations map[string]Reservation // by id
	Seats        []Seat                 // of all events
	Outbox       int                    // messages that are not published
	Queue        int                    // messages that are published and not settled
	Dead         int                    // dead letters, in the outbox and of the consumers
	Claims       int                    // idempotency keys in use
}

// Reservation is a reservation as it is stored.
type Reservation struct {
	User      string
	EventID   string
	Status    string // held, confirmed, cancelled or expired
	Learned   string // the status in the read model; empty: not there yet
	ExpiresAt time.Time
	Seats     []string
}

// Seat is a seat as it is stored.
type Seat struct {
	EventID, Name string
	State         string // free, held or confirmed
	Reservation   string // empty: free
}

func (s *State) fill(rows memory.Rows) {
	s.Reservations = make(map[string]Reservation, len(rows.Reservations))
	for _, r := range rows.Reservations {
		s.Reservations[r.ID] = Reservation{
			User: r.User, EventID: r.EventID, Status: string(r.Status), Learned: string(rows.Heard[r.ID]), ExpiresAt: r.ExpiresAt,
			Seats: booking.SeatNames(r.Seats),
		}
	}
	for _, e := range rows.Events {
		for _, seat := range e.Map {
			s.Seats = append(s.Seats, Seat{e.ID, booking.SeatName(seat.Number), string(seat.State), seat.ReservationID})
		}
	}
}
