package inboxredis

import (
	"context"
	"errors"
	"fmt"
	"net"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox/driver"
)

// unavailable are the beginnings of answers that Redis would give to every move.
var unavailable = []string{
	"OOM ", "MISCONF ", "NOREPLICAS ", "BUSY ", "LOADING ", "READONLY ", "MASTERDOWN ", "CLUSTERDOWN ", "TRYAGAIN ",
	"NOAUTH ", "WRONGPASS ", "DENIED ", "NOGROUP ", "max number of clients", "unknown command",
}

// classify turns the failure of a move into what driver.Source promises. What is no answer of Redis
// is a fault of the way there.
func classify(err error) error {
	if _, answered := errors.AsType[redis.Error](err); answered {
		for _, begin := range unavailable {
			if redis.HasErrorPrefix(err, begin) {
				return fmt.Errorf("inboxredis: move: %w: %w", driver.ErrUnavailable, err)
			}
		}
		return fmt.Errorf("inboxredis: move: %w: %w", driver.ErrRefused, err)
	}
	return fmt.Errorf("inboxredis: move: %w: %w", driver.ErrUnavailable, err)
}

func isTimeout(err error) bool {
	timeout, ok := errors.AsType[net.Error](err)
	return ok && timeout.Timeout() || errors.Is(err, context.DeadlineExceeded)
}
