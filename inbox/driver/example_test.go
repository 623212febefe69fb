package driver_test

import (
	"errors"
	"fmt"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

func ExampleNext() {
	failure := driver.Classify(errors.New("connection refused"))
	for attempt := 1; attempt <= 6; attempt++ {
		d := driver.Next(inbox.RetryPolicy{}, &inbox.Message{Attempt: attempt}, failure, time.Now(), 0.5)
		fmt.Println(attempt, d.Action, d.Delay)
	}
	// Output:
	// 1 retry 1s
	// 2 retry 2s
	// 3 retry 4s
	// 4 retry 8s
	// 5 retry 16s
	// 6 dead 0s
}

func ExampleClassify() {
	declined := inbox.Classed(inbox.Unrecoverable(errors.New("card declined")), "payment")
	busy := inbox.RetryAfter(errors.New("gateway is busy"), 30*time.Second)
	for _, err := range []error{declined, busy, errors.Join(declined, busy)} {
		f := driver.Classify(err)
		fmt.Println(f.Action, f.Class, f.After)
	}
	// Output:
	// dead payment 0s
	// retry default 30s
	// retry default 30s
}
