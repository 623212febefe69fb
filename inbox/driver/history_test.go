package driver_test

import (
	"errors"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

func TestProgressed(t *testing.T) {
	t.Parallel()
	begin := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	m := &inbox.Message{}
	for n := 1; n <= 30; n++ {
		f := driver.Classify(inbox.Recoverable(errors.New(strings.Repeat("ä", 200) + strconv.Itoa(n))))
		if n > 1 {
			f = driver.Classify(errors.New("boom " + strconv.Itoa(n)))
		}
		before := append([]inbox.FailedAttempt(nil), m.History...)
		p := driver.Progressed(m, f, driver.Decision{Counted: true, Recovered: n == 1}, "billing", begin.Add(time.Duration(n)*time.Second))
		if !reflect.DeepEqual(before, append([]inbox.FailedAttempt(nil), m.History...)) {
			t.Fatal("the message's own history was changed")
		}
		m.Attempt, m.Recovered, m.FirstFailedAt, m.History = p.Attempt, p.Recovered, p.FirstFailedAt, p.History
	}
	if m.Attempt != 31 || m.Recovered != 1 || !m.FirstFailedAt.Equal(begin.Add(time.Second)) || len(m.History) != driver.MaxHistory {
		t.Fatalf("after 30 failures: %+v", m)
	}
	for i, want := range []int{1, 2, 3, 4, 5, 26, 27, 28, 29, 30} {
		a := m.History[i]
		if !a.At.Equal(begin.Add(time.Duration(want)*time.Second)) || a.Consumer != "billing" || len(a.Error) > 200 || !utf8.ValidString(a.Error) {
			t.Errorf("entry %d is %+v, want failure %d", i, a, want)
		}
	}
	again := driver.Progressed(m, driver.Classify(inbox.Postpone(errors.New("not now"), 0)), driver.Decision{}, "billing", begin)
	if again.Attempt != 31 || len(again.History) != driver.MaxHistory || again.History[9].Error != "boom 30" {
		t.Errorf("a failure that does not count: %+v", again)
	}
}

func TestHistoryOnTheWire(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 1, 2, 3, 4, 5, 678, time.UTC)
	history := []inbox.FailedAttempt{{At: at, Error: "a <b> & \"c\"\n", Consumer: "billing"}, {At: at.Add(time.Second), Error: "d"}}
	if got := driver.DecodeHistory(driver.EncodeHistory(history)); !reflect.DeepEqual(got, history) {
		t.Errorf("read back %+v", got)
	}
	if text := driver.EncodeHistory(nil); text != "" {
		t.Errorf("no history is %q", text)
	}
	var long []inbox.FailedAttempt
	for range 2 * driver.MaxHistory {
		long = append(long, inbox.FailedAttempt{At: at, Error: strings.Repeat("\x01", 1000), Consumer: strings.Repeat("\x02", 1000)})
	}
	text := driver.EncodeHistory(long)
	if got := driver.DecodeHistory(text); len(text) > driver.MaxHistoryBytes || len(got) < 2 {
		t.Errorf("the longest history has %d bytes and %d entries", len(text), len(got))
	}
	for _, foreign := range []string{"", "x", "{}", "[1]", "null", "[[]]", strings.Repeat("[", 1<<20)} {
		if got := driver.DecodeHistory(foreign); len(got) != 0 {
			t.Errorf("%.20q is read as %+v", foreign, got)
		}
	}
	if got := driver.DecodeHistory(`[{"at":"yesterday","error":"x","more":1},null]`); len(got) != 2 || !got[0].At.IsZero() || got[0].Error != "x" {
		t.Errorf("half a history is read as %+v", got)
	}
}

// Whatever comes from outside is bounded, and what is made of it can be read back.
func FuzzHistory(f *testing.F) {
	f.Add(`[{"at":"2026-01-02T03:04:05Z","consumer":"c","error":"e"}]`)
	f.Fuzz(func(t *testing.T, text string) {
		history := driver.DecodeHistory(text)
		if len(history) > driver.MaxHistory {
			t.Fatalf("%d entries", len(history))
		}
		again := driver.EncodeHistory(history)
		if len(again) > driver.MaxHistoryBytes || len(history) > 0 && again == "" {
			t.Fatalf("%d entries become %d bytes", len(history), len(again))
		}
	})
}
