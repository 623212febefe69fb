package command

import (
	"bytes"
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/modules/operator/internal/core"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// JSON for a terminal is the same value, and no text in it controls the terminal.
func TestPrintJSON_escapesControlCharacters(t *testing.T) {
	t.Parallel()
	text := "a\x1b[2J \x7f \u0085 \u009b2J \u061c \u200f \u202e \u2066 \u2028\u2029 ü \U0001f600 \\u202e <b>"
	var out bytes.Buffer
	if err := printJSONTo(&out, map[string]string{"name": text}); err != nil {
		t.Fatal(err)
	}
	for _, r := range strings.TrimSuffix(out.String(), "\n") {
		if r != '\n' && core.ChangesTerminal(r) {
			t.Errorf("%U is printed", r)
		}
	}
	var back map[string]string
	if err := json.Unmarshal(out.Bytes(), &back); err != nil || back["name"] != text {
		t.Errorf("%s is read as %q, error %v", out.String(), back["name"], err)
	}
	if !strings.Contains(out.String(), "ü \U0001f600") || !strings.Contains(out.String(), "<b>") {
		t.Errorf("%s escapes more than it has to", out.String())
	}
}
