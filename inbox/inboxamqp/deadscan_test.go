package inboxamqp_test

import (
	"testing"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/amqptest"
)

// What is deleted makes room for further letters, of which none is passed over.
func TestRemoveSomeOfManyLetters(t *testing.T) {
	t.Parallel()
	for name, classic := range map[string]bool{"quorum": false, "classic": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const each = 80 // more than a scan is sent at once
			b := amqptest.New(t)
			letters := afterSetup(t, b, config{Classic: classic}).DeadLetters()
			for n := range 2 * each {
				p := order()
				p.Type = []string{"even", "odd"}[n%2]
				b.Publish(t, "", "failed.default", p)
			}
			awaitDepth(t, b, "failed.default", 2*each)
			for _, filter := range []inbox.Filter{{Name: "even"}, {}} {
				if n, err := letters.Remove(t.Context(), filter, inbox.Removal{By: "test"}); n != each || err != nil {
					t.Errorf("%+v: removed %d of %d, error %v", filter, n, each, err)
				}
			}
		})
	}
}
