package ratelimit

import (
	"fmt"
	"net/http"
	"strings"
	"time"
)

// HeaderDraft is the version of the IETF draft "RateLimit header fields for HTTP"
// (draft-ietf-httpapi-ratelimit-headers) that the middleware follows.
const HeaderDraft = 10

// writeHeaders states every limit of the decision as a structured list: q is the
// quota, w its window in seconds, r what remains, t the seconds until more comes.
func writeHeaders(h http.Header, d Decision) {
	limits := d.Limits()
	if len(limits) == 0 {
		return
	}
	policy := make([]string, len(limits))
	state := make([]string, len(limits))
	for i, l := range limits {
		policy[i] = fmt.Sprintf(`"%s";q=%d;w=%d`, l.Name, l.Max, seconds(l.Window))
		state[i] = fmt.Sprintf(`"%s";r=%d;t=%d`, l.Name, l.Remaining, seconds(l.Reset))
	}
	h.Set("RateLimit-Policy", strings.Join(policy, ", "))
	h.Set("RateLimit", strings.Join(state, ", "))
}

// seconds rounds up, so that a client which obeys is never too early.
func seconds(d time.Duration) int64 { return int64((d + time.Second - 1) / time.Second) }
