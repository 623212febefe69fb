package main

import (
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/internal/lab/shop"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// A link is cut and the bytes of another link are lost at once, but never on one link: a cut link cannot lose bytes, and
// its repair would end the cut.
func TestDoubles_cutAndLostBytesOnDifferentLinks(t *testing.T) {
	t.Parallel()
	s := &system{broker: new(testenv.Server)}
	for _, role := range roles {
		p := &process{Process: shop.New(role, nil), role: role, links: map[testenv.Kind]*testenv.Proxy{}}
		for _, kind := range s.kinds() {
			p.links[kind] = new(testenv.Proxy)
		}
		s.processes = append(s.processes, p)
	}
	pairs := 0
	for seed := range uint64(300) {
		d := &dealer{s: s, rng: rand.New(rand.NewPCG(seed, 0))}
		for _, f := range d.doubles() {
			if !strings.HasPrefix(f.target, "cut ") || !strings.Contains(f.target, "lost bytes") {
				continue
			}
			pairs++
			seen := map[*testenv.Proxy]bool{}
			for _, l := range f.links {
				if seen[l] {
					t.Errorf("seed %d: %s: one link has both", seed, f.target)
				}
				seen[l] = true
			}
		}
	}
	if pairs == 0 {
		t.Error("no pair of a cut link and lost bytes")
	}
}
