package idempotencytest_test

import (
	"testing"

	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest/conformance"
)

var backend = conformance.Backend{
	New:    func(*testing.T) driver.Store { return idempotencytest.NewStore() },
	Bubble: true,
}

func TestStore(t *testing.T) {
	t.Parallel()
	conformance.TestStore(t, backend)
}

func TestMiddleware(t *testing.T) {
	t.Parallel()
	conformance.TestMiddleware(t, backend)
}
