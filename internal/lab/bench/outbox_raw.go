package main

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/amqpconn"
)

// The bare client is fastest like this, on classic and quorum queues alike: one connection
// with gathered writes, several channels, a window of confirms on each.
const (
	rawChannels = 4
	rawWindow   = 250
)

// publishAlone is the broker's limit, for messages of body and content type alone.
func (d *drain) publishAlone(_ context.Context, n int, watch *stopwatch) int {
	conn := must(amqp.DialConfig(d.url, amqp.Config{Dial: func(network, addr string) (net.Conn, error) {
		conn, err := amqp.DefaultDial(10*time.Second)(network, addr)
		if err != nil {
			return nil, err
		}
		return amqpconn.GatherWrites(conn), nil
	}}))
	channels := make([]*amqp.Channel, rawChannels)
	for i := range channels {
		channels[i] = must(conn.Channel())
		check(channels[i].Confirm(false))
	}
	errs := make([]error, rawChannels)
	var running sync.WaitGroup
	watch.start()
	for i, ch := range channels {
		share := n / rawChannels
		if i == 0 {
			share += n % rawChannels
		}
		running.Go(func() { errs[i] = publishWindow(ch, d.queue, share, func(*amqp.Publishing) {}) })
	}
	running.Wait()
	watch.stop()
	check(errors.Join(errors.Join(errs...), conn.Close()))
	return n
}

var errNotConfirmed = errors.New("a message was not confirmed")

// publishWindow publishes n messages with at most rawWindow unconfirmed.
func publishWindow(ch *amqp.Channel, queue string, n int, complete func(*amqp.Publishing)) error {
	confirms := ch.NotifyPublish(make(chan amqp.Confirmation, rawWindow))
	open := 0
	for sent := 0; sent < n || open > 0; {
		if sent < n && open < rawWindow && len(confirms) == 0 {
			m := amqp.Publishing{DeliveryMode: amqp.Persistent, ContentType: "application/json", Body: body}
			complete(&m)
			if err := ch.Publish("", queue, false, false, m); err != nil {
				return err
			}
			sent++
			open++
			continue
		}
		if c, ok := <-confirms; !ok || !c.Ack {
			return errNotConfirmed
		}
		open--
	}
	return nil
}
