package ratelimit_test

import (
	"regexp"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/ratelimit"
)

var stored = regexp.MustCompile(`^[A-Za-z0-9._-]{1,64}$`)

func TestEncodeKey(t *testing.T) {
	t.Parallel()
	for _, key := range []string{"", "42", "user-42", "A.b_c-D", strings.Repeat("x", 64)} {
		if got := ratelimit.EncodeKey(key); got != key {
			t.Errorf("%q became %q", key, got)
		}
	}
	for _, key := range []string{"a:b", "{a}", "a b", "a\nb", "h-", "h-x", "ü", strings.Repeat("x", 65), strings.Repeat("x", 1<<20)} {
		got := ratelimit.EncodeKey(key)
		if got == key || !stored.MatchString(got) || !strings.HasPrefix(got, "h-") {
			t.Errorf("%.20q became %q", key, got)
		}
	}
}

func FuzzEncodeKey(f *testing.F) {
	f.Add("a", "a:b")
	f.Add("h-", "h-h-")
	f.Fuzz(func(t *testing.T, a, b string) {
		x, y := ratelimit.EncodeKey(a), ratelimit.EncodeKey(b)
		if (x == y) != (a == b) {
			t.Errorf("%q and %q became %q and %q", a, b, x, y)
		}
		if a != "" && !stored.MatchString(x) {
			t.Errorf("%q became %q", a, x)
		}
	})
}
