package inboxnats

import (
	"time"

	"github.com/nats-io/nats.go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// NewSources returns the sources and the dead letters of all partitions.
func NewSources(conn *nats.Conn, stream Stream, cfg inbox.ConsumerConfig) (all []driver.Source, of driver.DeadLetters, err error) {
	s, err := newSettings(conn, stream, inbox.NewMux(), cfg)
	var letters []driver.DeadLetters
	for _, p := range s.places {
		one := newSource(s, p)
		all, letters = append(all, one), append(letters, one.DeadLetters())
	}
	return all, driver.JoinDeadLetters(letters...), err
}

// NewTuned is NewConsumer with a maximum body and an interval of comparing shares; 0 means the default.
func NewTuned(conn *nats.Conn, stream Stream, p inbox.Processor, cfg inbox.ConsumerConfig, maxBodyBytes int, leveling time.Duration) (*Consumer, error) {
	s, err := newSettings(conn, stream, p, cfg)
	if err != nil {
		return nil, err
	}
	s.maxBodyBytes, s.leveling = maxBodyBytes, leveling
	return newConsumer(s, p)
}
