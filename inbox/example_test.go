package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
)

type OrderPlaced struct {
	Order string `json:"order"`
}

// A handler gets the decoded body. What it returns decides over the message: here one that
// no retry can mend goes to the dead letters at once, the other ones are processed.
func Example() {
	mux := inbox.NewMux()
	err := inbox.Handle(mux, "order.placed", func(_ context.Context, o OrderPlaced) error {
		if o.Order == "" {
			return inbox.Unrecoverable(errors.New("order has no number"))
		}
		fmt.Println("handled order", o.Order)
		return nil
	})
	if err != nil {
		fmt.Println(err)
		return
	}

	// In production the consumer is inboxamqp.NewConsumer, on RabbitMQ.
	broker, err := inboxtest.NewBroker(mux, inboxtest.Config{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- broker.Run(ctx) }()

	for _, body := range []string{`{"order":"A-1"}`, `{}`, `{"order":"A-2"}`, `not JSON`} {
		m := &inbox.Message{ID: uuid.Must(uuid.NewV7()), Name: "order.placed", Body: []byte(body)}
		if err := broker.Publish(ctx, m); err != nil {
			fmt.Println(err)
		}
	}
	if err := broker.Idle(ctx); err != nil {
		fmt.Println(err)
	}
	dead, _ := broker.DeadLetters().List(ctx, inbox.Filter{})
	for _, d := range dead {
		fmt.Printf("%s: %s\n", inbox.DeadLetterQueue("", d.Class), d.Error)
	}
	cancel()
	fmt.Println("stopped:", <-done)
	// Output:
	// handled order A-1
	// handled order A-2
	// failed.unrecoverable: order has no number
	// failed.validation: inbox: decode inbox_test.OrderPlaced: malformed JSON at byte 2
	// stopped: <nil>
}

func ExampleRetryPolicy_Next() {
	failure := inbox.Classify(errors.New("connection refused"))
	for attempt := 1; attempt <= 6; attempt++ {
		d := inbox.RetryPolicy{}.Next(&inbox.Message{Attempt: attempt}, failure, time.Now(), 0.5)
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
		f := inbox.Classify(err)
		fmt.Println(f.Action, f.Class, f.After)
	}
	// Output:
	// dead payment 0s
	// retry default 30s
	// retry default 30s
}
