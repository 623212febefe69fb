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
)

// checked is a store with a Check.
type checked struct {
	*world
	mu       sync.Mutex
	findings []expiry.Finding
	err      error
	calls    int
	slow     time.Duration // how long it takes
}

func (c *checked) Check(context.Context) ([]expiry.Finding, error) {
	time.Sleep(c.slow)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls++
	return c.findings, c.err
}

func (c *checked) answer(err error, findings ...expiry.Finding) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.err, c.findings = err, findings
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
		c.answer(nil, expiry.Finding{Component: "store", Problem: "no index", Mend: "CREATE INDEX"}, expiry.Finding{Problem: "no zone"})
		sw := newSweeper(t, c, expiry.SweeperConfig{})
		for _, err := range []error{sw.Run(t.Context()), func() error { _, err := sw.Sweep(t.Context()); return err }()} {
			unfit, ok := errors.AsType[*expiry.CheckError](err)
			if !ok || len(unfit.Findings) != 2 || !strings.Contains(err.Error(), "CREATE INDEX") || !strings.Contains(err.Error(), "no zone") {
				t.Errorf("got %v, want both findings", err)
			}
		}
		if batches, looks := c.counts(); batches+looks > 0 || len(c.table.Active()) != 1 {
			t.Errorf("the store was touched: %d batches, %d looks", batches, looks)
		}

		c.answer(errors.New("server is down"))
		stop := run(t, sw)
		defer stop()
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
