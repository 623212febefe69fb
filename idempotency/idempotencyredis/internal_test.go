package idempotencyredis

import (
	"context"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
)

// InFlightOf is InFlight with limits: most keys of each node, and the time bound.
func (s *Store) InFlightOf(ctx context.Context, most int, bound time.Duration) (n int, exact bool, err error) {
	found, err := s.inFlight(ctx, most, bound)
	return found.count, !found.estimated, err
}

// FuzzDecodeOutcome checks that any record is rejected, is a tombstone, or is an answer that can be sent.
func FuzzDecodeOutcome(f *testing.F) {
	f.Add("completed", "1", "ab", "201", `{"Location":["/1"]}`, "body", "")
	f.Add("completed", "", "", "-", "-", "-", `{"id":1}`)
	f.Add("processing", "x", "", "-30", "", "", "")
	f.Add("processing", "1", "ab", "9223372036854775807", "", "", "")
	f.Add("completed", "1", "ab", "100", "null", "", "")
	f.Add("completed", "1", "ab", "200", `{"":null,"content-length":["-1"],"A\r\nB":["\r\n"]}`, "\xff", "")
	f.Fuzz(func(t *testing.T, state, version, sum, code, hdr, body, response string) {
		reply := []any{state, version, sum, code, hdr, body, response}
		for i, field := range reply {
			if field == "-" { // a missing field
				reply[i] = nil
			}
		}
		out, err := decodeOutcome("begin", reply)
		if err != nil {
			return
		}
		switch out.State {
		case driver.Acquired, driver.InProgress:
		case driver.Completed:
			if !out.Response.Unavailable() {
				idempotency.Response(out.Response).Send(httptest.NewRecorder())
			}
		default:
			t.Errorf("state %d without an error", out.State)
		}
	})
}
