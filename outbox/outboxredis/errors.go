package outboxredis

import (
	"errors"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/outbox"
)

// classes are the answers of Redis that are about more than one message. They
// begin with a word in capitals.
var classes = map[string]outbox.Class{
	"OOM":         outbox.Blocked,
	"MISCONF":     outbox.Blocked, // the server cannot save and refuses writes
	"NOREPLICAS":  outbox.Blocked,
	"WRONGTYPE":   outbox.Unroutable, // the key of the stream is something else
	"BUSY":        outbox.Unavailable,
	"LOADING":     outbox.Unavailable,
	"READONLY":    outbox.Unavailable,
	"MASTERDOWN":  outbox.Unavailable,
	"CLUSTERDOWN": outbox.Unavailable,
	"TRYAGAIN":    outbox.Unavailable,
	"NOAUTH":      outbox.Unavailable,
	"WRONGPASS":   outbox.Unavailable,
	"NOPERM":      outbox.Unavailable,
}

// classify turns the outcome of an XADD into what Publisher promises. What is no answer of
// Redis is a fault of the way there.
func classify(err error) error {
	if err == nil {
		return nil
	}
	var answer redis.Error
	if !errors.As(err, &answer) {
		return &outbox.PublishError{Class: outbox.Unavailable, Err: err}
	}
	word, _, _ := strings.Cut(answer.Error(), " ")
	class, ok := classes[word]
	if !ok {
		class = outbox.Retryable
	}
	return &outbox.PublishError{Class: class, Err: err}
}
