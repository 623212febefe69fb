package testenv_test

import (
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// What is written at the primary is at the other, which takes writes once it is promoted, also after a restart.
func TestPromote(t *testing.T) {
	t.Parallel()
	for _, p := range products {
		if p.kind == testenv.RabbitMQ {
			continue
		}
		t.Run(string(p.kind), func(t *testing.T) {
			t.Parallel()
			primary := testenv.Private(t, p.kind, p.extra...)
			must(t, p.write(t.Context(), primary.URL()))
			standby, err := testenv.LaunchSpec(t.Context(), testenv.Spec{Kind: p.kind, Follows: primary.URL()})
			must(t, err)
			t.Cleanup(func() { must(t, standby.Close()) })
			testenv.Eventually(t, func() error { return p.read(t.Context(), standby.URL()) })
			must(t, primary.Kill())
			must(t, standby.Promote(t.Context()))
			must(t, standby.Kill())
			must(t, standby.Start(t.Context()))
			must(t, p.write(t.Context(), standby.URL()))
		})
	}
}
