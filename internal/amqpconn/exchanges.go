package amqpconn

import (
	"fmt"
	"sync"
	"time"
)

// missingFor is how long an exchange that did not exist is not asked for again.
const missingFor = time.Second

// exchanges remembers what a session knows of exchanges. Publishing to a missing
// one closes the channel and takes the whole window along, so each is asked for
// once before its first message.
type exchanges struct {
	conn *Conn

	mu      sync.RWMutex
	there   map[string]bool
	missing map[string]time.Time
}

func newExchanges(conn *Conn) *exchanges {
	return &exchanges{conn: conn, there: map[string]bool{"": true}, missing: map[string]time.Time{}}
}

func (x *exchanges) check(name string) error {
	x.mu.RLock()
	there := x.there[name]
	x.mu.RUnlock()
	if there {
		return nil
	}
	if reason, isBlocked := x.conn.Blocked(); isBlocked {
		return blocked(reason) // the question would go unanswered
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.there[name] {
		return nil
	}
	if time.Since(x.missing[name]) > missingFor {
		exists, err := x.conn.ExchangeExists(name)
		if err != nil {
			return unavailable(err)
		}
		if exists {
			x.there[name] = true
			return nil
		}
		x.missing[name] = time.Now()
	}
	return fmt.Errorf("%w: exchange %q does not exist", ErrUnroutable, name)
}
