package engine

import (
	"testing"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// Acknowledgements may wait only while the workers have half of what they take at once to do next.
func TestAcksMayWait(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		running, queued int
		want            bool
	}{
		"enough":         {running: 4, queued: 2, want: true},
		"too little":     {running: 4, queued: 1},
		"nothing":        {running: 4},
		"nothing begun":  {queued: 2},
		"one of many":    {running: 1, queued: 2, want: true},
		"the last begun": {running: 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := &settings{Config: Config{ConsumerConfig: inbox.ConsumerConfig{Concurrency: 4, Batch: 1, Prefetch: 16}}}
			h := newHand(cfg)
			r := &receipts{cfg: cfg, hand: h, next: &settlement{acks: []driver.Delivery{&delivered{}}}, spare: &settlement{}}
			for range c.running {
				h.queues.limits.begin(&job{items: []*item{newItem()}})
			}
			for range c.queued {
				h.queues.ready(newItem())
			}
			if got := r.outgoing().mayWait; got != c.want {
				t.Errorf("may wait: %v, want %v", got, c.want)
			}
		})
	}
}
