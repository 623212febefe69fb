package outboxredis

import (
	"errors"
	"io"
	"net"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/outbox"
)

// classes are the answers of Redis that are about more than one message, and those about a stream.
// The first of these beginnings that fits an answer counts.
var classes = []struct {
	begin string
	class outbox.Class
}{
	{"OOM ", outbox.Blocked},
	{"MISCONF ", outbox.Blocked}, // the server cannot save and refuses writes
	{"NOREPLICAS ", outbox.Blocked},
	{"WRONGTYPE ", outbox.Unroutable}, // the key of the stream is something else
	{"BUSY ", outbox.Unavailable},
	{"LOADING ", outbox.Unavailable},
	{"READONLY ", outbox.Unavailable},
	{"MASTERDOWN ", outbox.Unavailable},
	{"CLUSTERDOWN ", outbox.Unavailable},
	{"TRYAGAIN ", outbox.Unavailable},
	{"NOAUTH ", outbox.Unavailable},
	{"WRONGPASS ", outbox.Unavailable},
	{"DENIED ", outbox.Unavailable}, // protected mode
	{"ERR max number of clients", outbox.Unavailable},
	{"ERR unknown command", outbox.Unavailable}, // a server without streams
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
	return &outbox.PublishError{Class: classOf(answer.Error()), Err: err}
}

func classOf(answer string) outbox.Class {
	for _, c := range classes {
		if strings.HasPrefix(answer, c.begin) {
			return c.class
		}
	}
	if strings.HasPrefix(answer, "NOPERM ") {
		if strings.Contains(answer, "key") {
			return outbox.Unroutable // another stream may be open to this user
		}
		return outbox.Unavailable
	}
	return outbox.Retryable
}

// broken reports whether Redis has ended the connection.
func broken(err error) bool {
	if op, ok := errors.AsType[*net.OpError](err); ok {
		return op.Op != "dial" && !op.Timeout()
	}
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
}
