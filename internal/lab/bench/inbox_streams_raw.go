package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/redis/go-redis/v9"
)

// asDelivery is a stream's message for the transactions of the raw consumers.
func asDelivery(m redis.XMessage) amqp.Delivery {
	id, _ := m.Values["id"].(string)
	text, _ := m.Values["body"].(string)
	return amqp.Delivery{MessageId: id, Type: eventName, Body: []byte(text)}
}

func (s *streamIntake) rawOne(ctx context.Context, m redis.XMessage) error {
	d := asDelivery(m)
	var v string
	if err := json.Unmarshal(d.Body, &v); err != nil {
		return err
	}
	if err := s.rawPlain(ctx, d, v); err != nil {
		return err
	}
	return s.redis.XAck(ctx, s.stream, streamGroup, m.ID).Err()
}

// rawBatch is one goroutine with one transaction for so many messages.
func (s *streamIntake) rawBatch(size int) intakeRun {
	return func(ctx context.Context, n int, watch *stopwatch) {
		watch.start()
		defer watch.stop()
		for left := n; left > 0; {
			messages := must(s.read(ctx, min(size, left)))
			if len(messages) == 0 {
				continue
			}
			entries := make([]string, len(messages))
			deliveries := make([]amqp.Delivery, len(messages))
			for k, m := range messages {
				entries[k], deliveries[k] = m.ID, asDelivery(m)
			}
			check(s.rawTogether(ctx, deliveries))
			check(s.redis.XAck(ctx, s.stream, streamGroup, entries...).Err())
			left -= len(messages)
		}
	}
}

// watermill is intake.watermill on a stream.
func (s *streamIntake) watermill(handlers int) intakeRun {
	return func(ctx context.Context, n int, watch *stopwatch) {
		logger := watermill.NopLogger{}
		subscriber := must(redisstream.NewSubscriber(redisstream.SubscriberConfig{
			Client: redis.NewClient(s.redis.Options()), ConsumerGroup: streamGroup, Consumer: "watermill", Unmarshaller: fields{},
			BlockTime: 100 * time.Millisecond, DisableIndefiniteInitialBlock: true,
		}, logger))
		router := must(message.NewRouter(message.RouterConfig{}, logger))
		done := newFinish(n, watch)
		for h := range handlers {
			router.AddConsumerHandler(fmt.Sprint("bench", h), s.stream, subscriber, func(m *message.Message) error {
				if err := s.watermillOne(m); err != nil {
					return err
				}
				done.one()
				return nil
			})
		}
		running, cancel := context.WithCancel(ctx)
		defer cancel()
		ended := make(chan error, 1)
		watch.start()
		go func() { ended <- router.Run(running) }()
		check(done.wait(ctx))
		s.expect(ctx, n)                            // it acknowledges nothing more once it is closed
		check(errors.Join(router.Close(), <-ended)) // that ends the subscriber, which closes its client
	}
}

// fields reads the entries of the bench for watermill.
type fields struct{}

func (fields) Unmarshal(values map[string]any) (*message.Message, error) {
	id, _ := values["id"].(string)
	text, _ := values["body"].(string)
	return message.NewMessage(id, []byte(text)), nil
}
