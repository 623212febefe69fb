package conformance

import (
	"fmt"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// A dead letter keeps what its message knew of its attempts.
func testDeadKeepsProgress(t *testing.T, f SourceFixture) {
	first := time.Now().Add(-time.Hour).Truncate(time.Millisecond)
	source := running(t, f)
	s := begin(t, source, 10)
	f.Publish(t, full())
	take1(t, s, func(d driver.Delivery) {
		moved(t, source, s, later(d, 100*time.Millisecond, driver.Progress{Attempt: 4, Recovered: 2, FirstFailedAt: first}))
	})
	take1(t, s, func(d driver.Delivery) {
		moved(t, source, s, driver.Move{Delivery: d, Target: driver.ToDead, Letter: inbox.DeadLetter{
			Message: *d.Message(), Class: OwnClass, Error: "broken", Attempts: 4, FirstFailedAt: first, FailedAt: first,
		}})
	})
	await(t, func() error {
		letters := scan(t, f, OwnClass)
		if len(letters) != 1 || letters[0].Message.Attempt != 4 || letters[0].Message.Recovered != 2 || !letters[0].Message.FirstFailedAt.Equal(first) {
			return fmt.Errorf("dead letters %+v", letters)
		}
		return nil
	})
	ended(t, s)
}
