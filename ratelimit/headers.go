package ratelimit

import (
	"net/http"
	"strconv"
	"time"
)

// writeHeaders tells the client of its limits: in the form of
// draft-ietf-httpapi-ratelimit-headers-10, and with legacy in the X-RateLimit- fields too.
func writeHeaders(h http.Header, d Decision, legacy bool) {
	writeDraft10(h, d)
	if legacy {
		writeLegacy(h, d)
	}
}

// writeDraft10 writes every limit into two structured lists: q is its quota, w its window in seconds,
// r what remains, t the seconds until more comes.
func writeDraft10(h http.Header, d Decision) {
	var policySpace, stateSpace [128]byte
	policy, state := policySpace[:0], stateSpace[:0]
	for i, p := range d.parts() {
		s := d.state(p)
		if d.outdone(i, s) {
			continue
		}
		if len(policy) > 0 {
			policy, state = append(policy, ", "...), append(state, ", "...)
		}
		policy = appendItem(policy, s.Name, ";q=", s.Max, ";w=", s.Window)
		state = appendItem(state, s.Name, ";r=", s.Remaining, ";t=", s.Reset)
	}
	if len(policy) > 0 {
		h.Set("RateLimit-Policy", string(policy))
		h.Set("RateLimit", string(state))
	}
}

// outdone reports whether another part of the same limit, charged for another key, is nearer to its
// end: the draft wants one item per limit.
func (d *Decision) outdone(i int, s State) bool {
	for j, p := range d.parts() {
		if j == i || p.rule.Name != s.Name {
			continue
		}
		if left := d.state(p).Remaining; left < s.Remaining || left == s.Remaining && j < i {
			return true
		}
	}
	return false
}

// appendItem needs no escapes: names are plain.
func appendItem(b []byte, name, of string, n int64, within string, d time.Duration) []byte {
	b = append(append(append(b, '"'), name...), '"')
	b = strconv.AppendInt(append(b, of...), n, 10)
	return strconv.AppendInt(append(b, within...), seconds(d), 10)
}

// writeLegacy writes the limit that is nearest to its end.
func writeLegacy(h http.Header, d Decision) {
	s, ok := d.Binding()
	if !ok {
		return
	}
	h.Set("X-RateLimit-Limit", strconv.FormatInt(s.Max, 10))
	h.Set("X-RateLimit-Remaining", strconv.FormatInt(s.Remaining, 10))
	h.Set("X-RateLimit-Reset", strconv.FormatInt(seconds(s.Reset), 10))
}

// seconds rounds up, so that a client which obeys is never too early.
func seconds(d time.Duration) int64 { return int64((d + time.Second - 1) / time.Second) }
