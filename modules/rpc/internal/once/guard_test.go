package once_test

import (
	"context"
	"net/http"
	"os"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/answer"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/exchange"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/once"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// faster is a store without leases in which another run of each key completes first.
type faster struct {
	answer driver.Response
	by     driver.Fingerprint
}

func (faster) Begin(context.Context, driver.Claim) (driver.BeginResult, error) {
	return driver.BeginResult{State: driver.Acquired}, nil
}

func (faster) Extend(context.Context, driver.Claim) error { return nil }

func (s faster) Complete(_ context.Context, claim driver.Claim, _ driver.Response) error {
	claim.Settle(driver.BeginResult{State: driver.Completed, Fingerprint: s.by, Response: s.answer}, true)
	return idempotency.ErrLeaseLost
}

func (faster) Release(context.Context, driver.Claim) error { return nil }

// If another run has completed the key before this one, both clients get its answer, as over HTTP.
func TestDo_answersWithTheFasterRun(t *testing.T) {
	t.Parallel()
	kept, err := answer.OfMessage(wrapperspb.String("first"))
	if err != nil {
		t.Fatal(err)
	}
	do := func(by driver.Fingerprint) (once.Answer, bool) {
		guard, err := once.New(faster{driver.Response(kept), by}, idempotency.UnsafeGlobalScope, nil, idempotency.MiddlewareConfig{})
		if err != nil {
			t.Fatal(err)
		}
		about := exchange.Call{Procedure: "/shop.v1.Shop/Order", Header: http.Header{idempotency.Header: {string(idempotency.NewKey())}}}
		return guard.Do(t.Context(), about, wrapperspb.String("request"), func(context.Context) once.Answer {
			return once.Answer{Message: wrapperspb.String("second")}
		})
	}
	a, fresh := do(driver.Fingerprint{})
	got, _ := a.Message.(*wrapperspb.StringValue)
	if got.GetValue() != "first" || fresh || a.Status != nil || a.Header.Get(idempotency.ReplayedHeader) != "true" {
		t.Errorf("got %+v, fresh %v, want the answer of the faster run", a, fresh)
	}
	a, fresh = do(driver.FingerprintOf("another request"))
	if fresh || a.Message != nil || codes.Code(a.Status.GetCode()) != codes.FailedPrecondition {
		t.Errorf("got %+v, fresh %v, want the key rejected", a, fresh)
	}
}
