package wire_test

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/wire"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func TestHeaderString(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		in   any
		want string
		ok   bool
	}{
		{"text", "text", true},
		{[]byte("bytes"), "bytes", true},
		{int32(-7), "-7", true},
		{uint8(7), "7", true},
		{1.5, "1.5", true},
		{true, "true", true},
		{time.Unix(0, 0), "1970-01-01T00:00:00Z", true},
		{nil, "", false},
		{[]any{1}, "", false},
		{map[string]any{"a": 1}, "", false},
		{"\xff", "", false},
		{strings.Repeat("a", 1<<20), "", false},
	} {
		if got, ok := wire.HeaderString(tt.in); got != tt.want || ok != tt.ok {
			t.Errorf("HeaderString(%.40v) = %.40q, %v; want %q, %v", tt.in, got, ok, tt.want, tt.ok)
		}
	}
}
