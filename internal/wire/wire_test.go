package wire_test

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/wire"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func TestStamp(t *testing.T) {
	t.Parallel()
	id := ids.New()
	if got, ok := wire.DecodeStamp(wire.EncodeStamp(id)); !ok || got != id.String() {
		t.Fatalf("decoded %q, %v", got, ok)
	}
	for name, tt := range map[string]struct {
		in, want string
	}{
		"last of two":  {`[{"messageId":"a"},{"messageId":"b"}]`, "b"},
		"other fields": {`[{"messageId":"a","x":{"y":1}}]`, "a"},
		"no array":     {`{"messageId":"a"}`, ""},
		"empty array":  {`[]`, ""},
		"no id":        {`[{}]`, ""},
		"a number":     {`[{"messageId":7}]`, ""},
		"not JSON":     {`O:8:"stdClass"`, ""},
		"huge":         {`[{"messageId":"` + strings.Repeat("a", 1<<20) + `"}]`, ""},
	} {
		if got, ok := wire.DecodeStamp(tt.in); got != tt.want || ok != (tt.want != "") {
			t.Errorf("%s: DecodeStamp = %.40q, %v; want %q", name, got, ok, tt.want)
		}
	}
}

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

func FuzzDecodeStamp(f *testing.F) {
	f.Add(`[{"messageId":"019da3b2-7c4d-7e8f-a1b2-c3d4e5f60718"}]`)
	f.Add(`[[]]`)
	f.Fuzz(func(t *testing.T, value string) {
		if id, ok := wire.DecodeStamp(value); ok && (id == "" || len(id) > len(value)) {
			t.Errorf("DecodeStamp(%q) = %q", value, id)
		}
	})
}
