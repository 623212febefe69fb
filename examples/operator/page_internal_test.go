package operator

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) {
	ratesApart, liveEvery = 10*time.Millisecond, 200*time.Millisecond
	os.Exit(testenv.Run(m))
}

// Those who wait while a server is silent are told what the look before them has found: each look of its own would have
// them wait for as many times as there are viewers.
func TestSilentServerIsAskedOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		looks := 0
		s := sampler{look: func(context.Context) status {
			looks++
			now := status{At: time.Now()}
			time.Sleep(statusTimeout)
			return now
		}}
		for range 10 {
			s.sample(t.Context())
		}
		if looks != 1 {
			t.Errorf("it is asked %d times", looks)
		}
		time.Sleep(liveEvery)
		s.sample(t.Context())
		s.forget()
		s.sample(t.Context())
		if looks != 3 {
			t.Errorf("later it is asked %d times, want 3", looks)
		}
	})
}

// A body is made readable, but not into something far larger.
func TestReadable(t *testing.T) {
	t.Parallel()
	long := "[" + strings.Repeat("1,", maxEdit/4) + "1]"
	deep := strings.Repeat("[", 9999) + strings.Repeat("]", 9999)
	for body, want := range map[string]string{
		`{"a":[1]}`: "{\n  \"a\": [\n    1\n  ]\n}", "no JSON": "no JSON", "\xff": "1 bytes that are no text, in base64:\n/w==", deep: deep, long: long,
	} {
		if got := *readable([]byte(body)); got != want {
			t.Errorf("%.20q is shown as %.100q, %d bytes", body, got, len(got))
		}
	}
	large := strings.Repeat("ö", maxShown)
	if got := *readable([]byte(large)); len(got) > maxShown+200 || !strings.Contains(got, "all 2097152 of the body") {
		t.Errorf("a large body is shown in %d bytes: …%s", len(got), got[len(got)-100:])
	}
}

// What a form would change on its way is not edited in one.
func TestWhatAFormWouldChange(t *testing.T) {
	t.Parallel()
	for body, want := range map[string]bool{"a\nb": true, "a\r\nb": false, "a\x00b": false, "\xff": false, strings.Repeat("x", maxEdit+1): false} {
		one := oneLetter{}
		one.fill(nil, []byte(body))
		(&Page{}).uncover(&one)
		if one.Editable != want {
			t.Errorf("%.10q may be edited: %v", body, one.Editable)
		}
	}
}

// JSON for a terminal is the same value and controls no terminal, whatever its texts have.
func TestPrintJSON_escapesWhatChangesATerminal(t *testing.T) {
	t.Parallel()
	text := "a\x1b[2J \x7f \u0085 \u009b2J \u061c \u200f \u202e \u2066 \u2028\u2029 ü \U0001f600 \\u202e <b>"
	var out bytes.Buffer
	if err := printJSONTo(&out, map[string]string{"name": text}); err != nil {
		t.Fatal(err)
	}
	for _, r := range strings.TrimSuffix(out.String(), "\n") {
		if r != '\n' && changesTerminal(r) {
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

// No text in a page ends its event early or begins another.
func TestSendEvent_keepsItsLines(t *testing.T) {
	t.Parallel()
	w := httptest.NewRecorder()
	if err := sendEvent(visit{w: w}, "<p>a\rdata: b\r\n\r\revent: end</p>\n", false); err != nil {
		t.Fatal(err)
	}
	if got, want := w.Body.String(), "data: <p>a data: b \ndata:   event: end</p>\n\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
