package page

import (
	"context"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/internal/core"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// Viewers that wait while a server is silent share the result of one read. If each read again, they would wait
// many times as long.
func TestSampler_sharesSlowReads(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		reads := 0
		s := sampler{read: func(context.Context) core.Status {
			reads++
			now := core.Status{At: time.Now()}
			time.Sleep(10 * time.Second)
			return now
		}}
		for range 10 {
			s.sample(t.Context())
		}
		if reads != 1 {
			t.Errorf("it was asked %d times", reads)
		}
		time.Sleep(core.LiveEvery)
		s.sample(t.Context())
		s.forget()
		s.sample(t.Context())
		if reads != 3 {
			t.Errorf("later it was asked %d times, want 3", reads)
		}
	})
}

// A body is formatted for reading, unless the result would be far larger.
func TestReadable(t *testing.T) {
	t.Parallel()
	long := "[" + strings.Repeat("1,", core.MaxEdit/4) + "1]"
	deep := strings.Repeat("[", 9999) + strings.Repeat("]", 9999)
	for body, want := range map[string]string{
		`{"a":[1]}`: "{\n  \"a\": [\n    1\n  ]\n}", "no JSON": "no JSON", "\xff": "1 bytes that are no text, in base64:\n/w==", deep: deep, long: long,
	} {
		if got := *readable([]byte(body)); got != want {
			t.Errorf("%.20q is shown as %.100q, %d bytes", body, got, len(got))
		}
	}
	large := strings.Repeat("ö", maxShown)
	if got := *readable([]byte(large)); len(got) > maxShown+200 || !strings.Contains(got, "prints all 2097152") {
		t.Errorf("a large body is shown in %d bytes: …%s", len(got), got[len(got)-100:])
	}
}

// A body that a form would change on its way cannot be edited.
func TestUncover_editableBodies(t *testing.T) {
	t.Parallel()
	for body, want := range map[string]bool{"a\nb": true, "a\r\nb": false, "a\x00b": false, "\xff": false, strings.Repeat("x", core.MaxEdit+1): false} {
		one := oneMessage{}
		one.Fill(nil, []byte(body))
		(&Page{}).uncover(&one)
		if one.Editable != want {
			t.Errorf("%.10q may be edited: %v", body, one.Editable)
		}
	}
}

// A chart draws no number that nobody has measured, and no step that has not ended.
func TestBars_unknownNumbers(t *testing.T) {
	t.Parallel()
	end := time.Date(2026, 1, 2, 3, 5, 0, 0, time.UTC)
	h := &core.History{Hour: []operator.Figures{
		{At: end.Add(-110 * time.Second), Part: "outbox", Done: 9, Measured: true, Waiting: 1200},
		{At: end.Add(-110 * time.Second), Part: "billing", Done: 9},
		{At: end.Add(-50 * time.Second), Part: "outbox", Done: 7},
	}}
	all := bars(h, "", hour, end)
	before, last := all[58], all[59]
	if got := before.Title() + "; " + last.Title(); got != "03:03: 18 done, 0 failed, 1,200+ waiting, 0+ dead; 03:04: 7 done, 0 failed, – waiting, – dead" || last.Age() != "–" {
		t.Error(got, last.Age())
	}
	if got := bars(h, "outbox", hour, end)[58].Measured(1200); got != "1,200" {
		t.Errorf("one part is %s", got)
	}
	for what, want := range map[string]int{work.name: 59, waiting.name: 60} {
		c := chart{figure: figure{name: what, of: waiting.of}, Bars: all}
		if got := strings.Count(string(c.Picture()), "<g>"); got != want {
			t.Errorf("%s has %d bars, want %d", what, got, want)
		}
	}
	if line := string(spark(h, "outbox", end)); !strings.Contains(line, `points="232,`) {
		t.Errorf("the line has minutes without a record: %s", line)
	}
}

// Of very many processes the page shows the ones with the oldest messages, and gone ones only if there is room.
func TestRunningView_shown(t *testing.T) {
	t.Parallel()
	now := time.Now()
	var r runningView
	for n := range 1000 {
		one := core.Process{PID: n}
		switch {
		case n == 990:
			one.Oldest = now.Add(-time.Hour)
		case n%20 == 0:
			one.Oldest = now.Add(-time.Duration(n) * time.Second)
		case n%20 == 1:
			one.Gone, one.Oldest = true, now.Add(-2*time.Hour)
		}
		r.Processes = append(r.Processes, one)
	}
	shown := r.Shown()
	if len(shown) != processesShown || shown[0].PID != 990 || shown[1].PID != 980 || shown[51].PID != 1 || shown[52].PID != 2 {
		t.Errorf("%d are shown: %v", len(shown), shown)
	}
	r.Processes = r.Processes[:processesShown]
	if shown := r.Shown(); len(shown) != processesShown || shown[1].PID != 1 {
		t.Errorf("of few %d are shown: %v", len(shown), shown)
	}
}

// No text in a page ends its event early or starts another.
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

// Nobody requested the results of a read for a while. The next request starts another read.
func TestReads_afterAbandon(t *testing.T) {
	t.Parallel()
	for _, slow := range []bool{false, true} { // the abandoned read ends at once, or later
		synctest.Test(t, func(t *testing.T) {
			var r reads
			started := 0
			find := func(ctx context.Context, _ func(any)) (any, bool, error) {
				if started++; started > 1 {
					return "found", false, nil
				}
				<-ctx.Done()
				if slow {
					time.Sleep(time.Second)
				}
				return nil, false, ctx.Err()
			}
			if first := r.results(t.Context(), "view", false, find); !first.Running() {
				t.Errorf("%+v", first)
			}
			time.Sleep(abandonAfter)
			if second := r.results(t.Context(), "view", false, find); second.found != "found" || second.err != nil {
				t.Errorf("slow %v: %+v", slow, second)
			}
			time.Sleep(time.Minute)
		})
	}
}
