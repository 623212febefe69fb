package headers_test

import (
	"encoding/json"
	"net/http"
	"os"
	"reflect"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/holdfast-go/holdfast/idempotency/internal/headers"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func TestEncode(t *testing.T) {
	t.Parallel()
	for want, h := range map[string]http.Header{
		`{}`:                              nil,
		`{"Link":["</a>","</b>"]}`:        {"Link": {"</a>", "</b>"}},
		`{"X":["ü",{"base64":"YWL/"}]}`:   {"X": {"ü", "ab\xff"}},
		`{"X":["{\"base64\":\"YWL/\"}"]}`: {"X": {`{"base64":"YWL/"}`}},
	} {
		text, err := headers.Encode(h)
		if err != nil || text != want && want != `{"Link":["</a>","</b>"]}` {
			t.Errorf("Encode(%q) = %s, %v; want %s", h, text, err, want)
		}
		if got, err := headers.Decode(text); err != nil || len(got) != len(h) || len(h) > 0 && !reflect.DeepEqual(got, h) {
			t.Errorf("Decode(%s) = %q, %v; want %q", text, got, err, h)
		}
	}
}

// FuzzRoundTrip checks that headers are decoded byte for byte as they were encoded.
func FuzzRoundTrip(f *testing.F) {
	f.Add("a", "b")
	f.Add("\xff", `{"base64":"YWL/"}`)
	f.Add("\x00\u2028", "\xed\xa0\x80")
	f.Fuzz(func(t *testing.T, a, b string) {
		h := http.Header{"A": {a, b}, "B": {b}, "C": nil}
		text, err := headers.Encode(h)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := headers.Decode(text); err != nil || !reflect.DeepEqual(got, h) {
			t.Errorf("%q came back as %q, %v", h, got, err)
		}
	})
}

// FuzzJSON checks that headers without base64 are the same JSON that package encoding/json writes and reads.
func FuzzJSON(f *testing.F) {
	f.Add("Link", "</a>", "b", `{"A":["b","c"],"D":["e"]}`)
	f.Add("", "\"", "\\", `{"A":["b"],"A":["c","d"]}`)
	f.Add("ü", "\x7f", "\x00", `{"A":[],"B":null}`)
	f.Add("A", "a&b", "c", `{"A":["b"]}x`)
	f.Add("A", "b", "c", `{"A":["b",]}`)
	f.Fuzz(func(t *testing.T, name, a, b, text string) {
		if utf8.ValidString(a) && utf8.ValidString(b) {
			h := http.Header{name: {a, b}, "B": {b}, "A": {}}
			got, err := headers.Encode(h)
			if want, wantErr := json.Marshal(h); got != string(want) || err != nil || wantErr != nil {
				t.Errorf("Encode(%q) = %s, %v; want %s, %v", h, got, err, want, wantErr)
			}
			delete(h, "A")
			if got, err = headers.Encode(h); err != nil {
				t.Error(err)
			}
			if want, _ := json.Marshal(h); got != string(want) && len(h) > 0 {
				t.Errorf("Encode(%q) = %s; want %s", h, got, want)
			}
		}
		if text == "" || text == "{}" || strings.Contains(text, `{"base64"`) {
			return
		}
		var want http.Header
		wantErr := json.Unmarshal([]byte(text), &want)
		if got, err := headers.Decode(text); (err == nil) != (wantErr == nil) || err == nil && !reflect.DeepEqual(got, want) {
			t.Errorf("Decode(%s) = %q, %v; want %q, %v", text, got, err, want, wantErr)
		}
	})
}

// FuzzDecode checks that any stored text is a header or an error.
func FuzzDecode(f *testing.F) {
	for _, text := range []string{"", "{}", "null", `{"a":["b"]}`, `{"a":[{"base64":"%"}]}`, `{"a":[{"base64":1}]}`, `{"a":null,"b":[{"base64":"AA=="},null]}`, "["} {
		f.Add(text)
	}
	f.Fuzz(func(_ *testing.T, text string) { _, _ = headers.Decode(text) })
}
