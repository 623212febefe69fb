package storedkey_test

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/ratelimit/internal/storedkey"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

var stored = regexp.MustCompile(`^[A-Za-z0-9._-]{1,64}$`)

func TestEncode(t *testing.T) {
	t.Parallel()
	for _, key := range []string{"", "42", "user-42", "A.b_c-D", strings.Repeat("x", 64)} {
		if got := storedkey.Encode(key); got != key {
			t.Errorf("%q became %q", key, got)
		}
	}
	for _, key := range []string{"a:b", "{a}", "a b", "a\nb", "h-", "h-x", "ü", strings.Repeat("x", 65), strings.Repeat("x", 1<<20)} {
		got := storedkey.Encode(key)
		if got == key || !stored.MatchString(got) || !strings.HasPrefix(got, "h-") {
			t.Errorf("%.20q became %q", key, got)
		}
	}
}

func FuzzEncode(f *testing.F) {
	f.Add("a", "a:b")
	f.Add("h-", "h-h-")
	f.Fuzz(func(t *testing.T, a, b string) {
		x, y := storedkey.Encode(a), storedkey.Encode(b)
		if (x == y) != (a == b) {
			t.Errorf("%q and %q became %q and %q", a, b, x, y)
		}
		if a != "" && !stored.MatchString(x) {
			t.Errorf("%q became %q", a, x)
		}
	})
}
