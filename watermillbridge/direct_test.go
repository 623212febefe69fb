package watermillbridge_test

import (
	"context"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/watermillbridge"
)

// kept is a publisher that keeps what it is given.
type kept struct{ driver.Message }

func (k *kept) Publish(_ context.Context, m driver.Message, done func(error)) {
	k.Message = m
	done(nil)
}

// What goes past the outbox, which would set its time, has one all the same.
func TestDirectSetsTheTime(t *testing.T) {
	t.Parallel()
	var to kept
	begin := time.Now()
	if err := watermillbridge.Direct(&to)(t.Context(), outbox.Message{Name: "order.placed", Body: []byte("{}")}); err != nil {
		t.Fatal(err)
	}
	if at := to.CreatedAt; at.Before(begin) || at.After(time.Now()) {
		t.Errorf("sent with the time %v", at)
	}
}
