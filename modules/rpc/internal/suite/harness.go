// Package suite tests the interceptors of both protocols, over real connections.
package suite

import (
	"context"
	"fmt"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/exchange"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/shopv1"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/txretry"
)

// Setup is a server to be tested: the shop behind the limits, if it has a limiter, and behind
// idempotency, if it has a store.
type Setup struct {
	Place func(ctx context.Context, req *shopv1.PlaceOrderRequest, set Set) (*shopv1.Order, error)
	Watch func(ctx context.Context) error // before the stream's message; optional

	Store driver.Store
	Needs func(procedure string) bool
	Once  idempotency.MiddlewareConfig

	Limiter ratelimit.Limiter
	Charges func(*http.Request) ([]ratelimit.Charge, error)
	Limits  ratelimit.MiddlewareConfig
}

// Watching calls Watch, if there is one.
func (s Setup) Watching(ctx context.Context) error {
	if s.Watch == nil {
		return nil
	}
	return s.Watch(ctx)
}

// User returns the scope of a request: its caller. "nobody" has an empty one.
func User(r *http.Request) (string, error) {
	if user := r.Header.Get("X-User"); user != "nobody" {
		return user, nil
	}
	return "", nil
}

// Set adds metadata to the answer of a handler.
type Set func(header, trailer http.Header)

// Failure is an error of a handler, which each protocol converts in its own way.
type Failure struct{ Status *spb.Status }

// Error implements error.
func (f *Failure) Error() string { return f.Status.GetMessage() }

// Fail returns a Failure.
func Fail(code codes.Code, message string, details ...proto.Message) error {
	f := &Failure{Status: &spb.Status{Code: int32(code), Message: message}}
	for _, d := range details {
		packed, err := anypb.New(d)
		if err != nil {
			return err
		}
		f.Status.Details = append(f.Status.Details, packed)
	}
	return f
}

// Ask is the request of a client.
type Ask struct {
	Keys   []string // none: no key
	User   string   // empty: ann
	Cents  int64
	Labels map[string]string
	// Unknown are fields that the server does not know, in their wire form.
	Unknown []byte
}

// Order returns the message of a call that places an order.
func (a Ask) Order() *shopv1.PlaceOrderRequest {
	m := &shopv1.PlaceOrderRequest{Cents: a.Cents, Labels: a.Labels}
	m.ProtoReflect().SetUnknown(a.Unknown)
	return m
}

// Header returns the metadata of an Ask.
func (a Ask) Header() http.Header {
	h := http.Header{"X-User": {a.User}}
	if a.User == "" {
		h.Set("X-User", "ann")
	}
	if a.Keys != nil {
		h["Idempotency-Key"] = a.Keys
	}
	return h
}

// Reply is the answer to a client.
type Reply struct {
	Order   *shopv1.Order
	Status  *spb.Status // nil after success
	Header  http.Header
	Trailer http.Header
}

// Client calls a server.
type Client interface {
	// Bare reports whether the answers of this protocol have no metadata.
	Bare() bool
	// Record returns an order in the form in which the server stores it.
	Record(order *shopv1.Order) (idempotency.Response, error)
	Place(ctx context.Context, a Ask) Reply
	Get(ctx context.Context, a Ask) Reply
	// Health calls the service grpc.health.v1.Health without metadata, once unary and once as a stream.
	Health(ctx context.Context) error
	// Watch returns the end of the stream, and its header.
	Watch(ctx context.Context, a Ask) Reply
}

// Protocol starts a server that ends with the test, and returns its client.
type Protocol func(t *testing.T, s Setup) Client

// Patience is how long a test waits for something that must happen. It detects a hang.
const Patience = testenv.Patience

func (r Reply) replayed() bool { return r.Header.Get(idempotency.ReplayedHeader) == "true" }

// code returns the code, OK after success.
func (r Reply) code() codes.Code { return codes.Code(r.Status.GetCode()) }

// detail returns the first detail of a type.
func detail[M proto.Message](r Reply) (found M, ok bool) {
	for _, packed := range r.Status.GetDetails() {
		if m, err := packed.UnmarshalNew(); err == nil {
			if found, ok = m.(M); ok {
				return found, true
			}
		}
	}
	return found, false
}

// is checks the code and, for an error of a middleware, its word.
func (r Reply) is(t *testing.T, code codes.Code, reason string) {
	t.Helper()
	if r.code() != code {
		t.Errorf("got %v %v; want %v %s", r.Order, r.Status, code, reason)
		return
	}
	if reason == "" {
		return
	}
	info, _ := detail[*errdetails.ErrorInfo](r)
	help, _ := detail[*errdetails.Help](r)
	if info.GetReason() != reason || info.GetDomain() != exchange.Domain || r.Status.GetMessage() == "" {
		t.Errorf("got %v; want the reason %s", r.Status, reason)
	}
	if linked := len(help.GetLinks()) == 1; linked != (reason != "INTERNAL") {
		t.Errorf("%s links to %v", reason, help)
	}
}

// waits checks that an error has a time to wait.
func (r Reply) waits(t *testing.T) {
	t.Helper()
	if retry, ok := detail[*errdetails.RetryInfo](r); !ok || retry.GetRetryDelay().AsDuration() <= 0 {
		t.Errorf("%v has no delay", r.Status)
	}
}

// Stores returns the stores of a suite: memory, Redis and Postgres. Keys are random, so the tests
// share one database each. lease is for Redis and Postgres.
func Stores(t *testing.T, lease time.Duration) map[string]driver.Store {
	t.Helper()
	redis, err := idempotencyredis.New(redistest.New(t), idempotencyredis.Config{Lease: lease})
	if err != nil {
		t.Fatal(err)
	}
	manager, err := txretry.New(pgtest.New(t), txretry.Config{})
	if err != nil {
		t.Fatal(err)
	}
	postgres, err := idempotencypgx.New(manager, idempotencypgx.Config{Lease: lease})
	if err != nil {
		t.Fatal(err)
	}
	if err := postgres.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	return map[string]driver.Store{"memory": idempotencytest.NewStore(), "Redis": redis, "Postgres": postgres}
}

// TestAcross checks that servers of two protocols on one store are one service.
func TestAcross(t *testing.T, protocols [2]Protocol, store driver.Store) {
	var runs atomic.Int64
	var clients []Client
	for _, start := range protocols {
		clients = append(clients, start(t, Setup{Store: store, Place: func(_ context.Context, req *shopv1.PlaceOrderRequest, _ Set) (*shopv1.Order, error) {
			n := runs.Add(1)
			if req.GetCents() < 0 {
				return nil, Fail(codes.InvalidArgument, fmt.Sprint("refusal ", n), &errdetails.ErrorInfo{Reason: "NEGATIVE", Domain: "shop"})
			}
			return &shopv1.Order{Id: fmt.Sprint("order ", n)}, nil
		}}))
	}
	for n, first := range clients {
		for _, cents := range []int64{1, -1} {
			ask := Ask{Keys: newKey(), Cents: cents}
			want := first.Place(t.Context(), ask)
			for _, other := range clients {
				if got := other.Place(t.Context(), ask); !proto.Equal(got.Order, want.Order) || !proto.Equal(got.Status, want.Status) || !got.replayed() {
					t.Errorf("from protocol %d: %v, then %v", n, want, got)
				}
			}
			clients[1-n].Place(t.Context(), Ask{Keys: ask.Keys, Cents: 7}).is(t, codes.FailedPrecondition, "IDEMPOTENCY_KEY_REUSED")
		}
	}
}
