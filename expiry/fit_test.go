package expiry_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/internal/check"
)

// checked is a store that says whether it is fit to be swept.
type checked struct {
	*world
	mu    sync.Mutex
	err   error
	calls int
}

func (c *checked) Fit(context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls++
	return c.err
}

func (c *checked) answer(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.err = err
}

func (c *checked) asked() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.calls
}

func TestUnfitStoreIsNotTouched(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := &checked{world: newWorld(t)}
		c.hold(t, "row", -time.Second)
		c.answer(errors.Join(check.New("store", "no index", "CREATE INDEX"), check.New("store", "no zone", "ALTER TABLE")))
		sw := newSweeper(t, c, expiry.SweeperConfig{})
		for _, err := range []error{sw.Check(t.Context()), sw.Run(t.Context()), func() error { _, err := sw.Sweep(t.Context()); return err }()} {
			if err == nil || !strings.Contains(err.Error(), "CREATE INDEX") || !strings.Contains(err.Error(), "no zone") {
				t.Errorf("got %v, want both findings", err)
			}
		}
		if batches, looks := c.counts(); batches+looks > 0 || len(c.table.Active()) != 1 {
			t.Errorf("the store was touched: %d batches, %d looks", batches, looks)
		}

		c.answer(errors.New("server is down"))
		defer run(t, sw)()
		time.Sleep(time.Minute)
		if len(c.table.Active()) != 1 {
			t.Error("swept without a check")
		}
		c.answer(nil)
		time.Sleep(time.Minute)
		calls := c.asked()
		time.Sleep(time.Hour)
		if left, more := len(c.table.Active()), c.asked()-calls; left != 0 || more != 0 {
			t.Errorf("%d rows left, %d checks more", left, more)
		}
	})
}
