package harness

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sync"
	"time"
)

// prober is the client that asks whether the apis answer.
const prober = -1

// AllAnswer returns what fails until every api has promptly answered a hold for every large event.
func (c *Crowd) AllAnswer() func(context.Context) error {
	const promptly = 2 * time.Second
	type way struct {
		api   int
		event string
	}
	left := map[way]bool{}
	ways := len(c.apis()) * len(c.large)
	for api := range c.apis() {
		for _, event := range c.large {
			left[way{api, event}] = true
		}
	}
	return func(ctx context.Context) error {
		var mu sync.Mutex
		var all sync.WaitGroup
		for _, w := range slices.Collect(maps.Keys(left)) { // the goroutines delete from it
			all.Go(func() {
				ctx, cancel := context.WithTimeout(ctx, promptly)
				defer cancel()
				a := c.send(ctx, prober, w.api, holdRequest(newKey(), w.event, `"quantity":1`))
				mu.Lock()
				defer mu.Unlock()
				if a.Status == http.StatusCreated {
					delete(left, w)
				}
			})
		}
		all.Wait()
		if len(left) > 0 {
			return fmt.Errorf("%d of %d ways to hold a seat do not work", len(left), ways)
		}
		return nil
	}
}
