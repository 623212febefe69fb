package outboxredis

import (
	"errors"
	"io"
	"net"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/outbox/driver"
)

// classes are the answers of Redis that are about more than one message, and those about a stream.
// The first of these beginnings that fits an answer counts.
var classes = []struct {
	begin string
	class driver.Class
}{
	{"OOM ", driver.Blocked},
	{"MISCONF ", driver.Blocked}, // the server cannot save and refuses writes
	{"NOREPLICAS ", driver.Blocked},
	{"WRONGTYPE ", driver.Unroutable}, // the key of the stream is something else
	{"BUSY ", driver.Unavailable},
	{"LOADING ", driver.Unavailable},
	{"READONLY ", driver.Unavailable},
	{"MASTERDOWN ", driver.Unavailable},
	{"CLUSTERDOWN ", driver.Unavailable},
	{"TRYAGAIN ", driver.Unavailable},
	{"NOAUTH ", driver.Unavailable},
	{"WRONGPASS ", driver.Unavailable},
	{"DENIED ", driver.Unavailable}, // protected mode
	{"ERR max number of clients", driver.Unavailable},
	{"ERR unknown command", driver.Unavailable}, // a server without streams
}

// classify turns the outcome of an XADD into what Publisher promises. What is no answer of
// Redis is a fault of the way there.
func classify(err error) error {
	if err == nil {
		return nil
	}
	var answer redis.Error
	if !errors.As(err, &answer) {
		return &driver.PublishError{Class: driver.Unavailable, Err: err}
	}
	return &driver.PublishError{Class: classOf(answer.Error()), Err: err}
}

func classOf(answer string) driver.Class {
	for _, c := range classes {
		if strings.HasPrefix(answer, c.begin) {
			return c.class
		}
	}
	if strings.HasPrefix(answer, "NOPERM ") {
		if strings.Contains(answer, "key") {
			return driver.Unroutable // another stream may be open to this user
		}
		return driver.Unavailable
	}
	return driver.Retryable
}

// broken reports whether Redis has ended the connection.
func broken(err error) bool {
	if op, ok := errors.AsType[*net.OpError](err); ok {
		return op.Op != "dial" && !op.Timeout()
	}
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
}
