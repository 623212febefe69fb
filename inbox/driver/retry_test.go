package driver_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/internal/base"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

const ms = time.Millisecond

func TestNextDelays(t *testing.T) {
	t.Parallel()
	now := time.Now()
	f := driver.Classify(errors.New("boom"))
	wants := [][3]time.Duration{
		{800 * ms, 1000 * ms, 1200 * ms},
		{1600 * ms, 2000 * ms, 2400 * ms},
		{3200 * ms, 4000 * ms, 4800 * ms},
		{6400 * ms, 8000 * ms, 9600 * ms},
		{12800 * ms, 16000 * ms, 19200 * ms},
	}
	for i, want := range wants {
		m := &inbox.Message{Attempt: i + 1}
		for j, random := range []float64{0, 0.5, 0.999999} {
			got := driver.Next(inbox.RetryPolicy{}, m, f, now, random)
			if got != (driver.Decision{Action: driver.ActionRetry, Delay: want[j], Counted: true}) {
				t.Errorf("attempt %d, random %v: %+v, want delay %v", i+1, random, got, want[j])
			}
		}
	}
	dead := driver.Next(inbox.RetryPolicy{}, &inbox.Message{Attempt: 6}, f, now, 0)
	if dead != (driver.Decision{Action: driver.ActionDead, Counted: true}) {
		t.Errorf("attempt 6: %+v, want dead", dead)
	}
	if first := driver.Next(inbox.RetryPolicy{}, &inbox.Message{}, f, now, 0.5); first.Delay != time.Second {
		t.Errorf("attempt 0 counts as 1, got %+v", first)
	}
}

func TestNext(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	boom := errors.New("boom")
	for name, tt := range map[string]struct {
		policy inbox.RetryPolicy
		msg    inbox.Message
		err    error
		want   driver.Decision
	}{
		"no retries": {
			policy: inbox.RetryPolicy{MaxAttempts: 1}, err: boom,
			want: driver.Decision{Action: driver.ActionDead, Counted: true},
		},
		"unrecoverable": {
			err:  inbox.Unrecoverable(boom),
			want: driver.Decision{Action: driver.ActionDead, Counted: true},
		},
		"recoverable is not bounded by the number": {
			msg: inbox.Message{Attempt: 1000, FirstFailedAt: now.Add(-24 * time.Hour)}, err: inbox.Recoverable(boom),
			want: driver.Decision{Action: driver.ActionRetry, Delay: time.Minute, Counted: true, Recovered: true},
		},
		"recoverable failures use up no retries": {
			msg: inbox.Message{Attempt: 12, Recovered: 7}, err: boom,
			want: driver.Decision{Action: driver.ActionRetry, Delay: time.Minute, Counted: true},
		},
		"retries are used up beside them": {
			msg: inbox.Message{Attempt: 12, Recovered: 6}, err: boom,
			want: driver.Decision{Action: driver.ActionDead, Counted: true},
		},
		"recoverable is bounded by age": {
			msg: inbox.Message{Attempt: 2, FirstFailedAt: now.Add(-24*time.Hour - 1)}, err: inbox.Recoverable(boom),
			want: driver.Decision{Action: driver.ActionDead, Counted: true},
		},
		"delay asked for": {
			err:  inbox.RetryAfter(boom, 90*time.Second),
			want: driver.Decision{Action: driver.ActionRetry, Delay: 90 * time.Second, Counted: true, Recovered: true},
		},
		"delay asked for, beyond the age": {
			err:  inbox.RetryAfter(boom, 240*time.Hour),
			want: driver.Decision{Action: driver.ActionRetry, Delay: 24 * time.Hour, Counted: true, Recovered: true},
		},
		"postponed, however old": {
			msg: inbox.Message{Attempt: 9, FirstFailedAt: now.Add(-240 * time.Hour)}, err: inbox.Postpone(boom, time.Second),
			want: driver.Decision{Action: driver.ActionRetry, Delay: time.Second},
		},
		"postponed after failures, without a delay": {
			msg: inbox.Message{Attempt: 5}, err: inbox.Postpone(boom, 0),
			want: driver.Decision{Action: driver.ActionRetry, Delay: time.Second},
		},
		"a delay that is too short": {
			err:  inbox.RetryAfter(boom, 1),
			want: driver.Decision{Action: driver.ActionRetry, Delay: 100 * time.Millisecond, Counted: true, Recovered: true},
		},
		"postponed by too little": {
			err:  inbox.Postpone(boom, 1),
			want: driver.Decision{Action: driver.ActionRetry, Delay: 100 * time.Millisecond},
		},
		"a short delay of a quick policy": {
			policy: inbox.RetryPolicy{BaseDelay: 20 * time.Millisecond}, err: inbox.Postpone(boom, 1),
			want: driver.Decision{Action: driver.ActionRetry, Delay: 20 * time.Millisecond},
		},
		"unavailable": {
			msg: inbox.Message{Attempt: 6}, err: inbox.Unavailable(boom),
			want: driver.Decision{Action: driver.ActionReturn},
		},
		"draining": {
			msg: inbox.Message{Attempt: 6}, err: errors.Join(inbox.ErrDraining, boom),
			want: driver.Decision{Action: driver.ActionReturn},
		},
		"jitter never exceeds the longest delay": {
			policy: inbox.RetryPolicy{BaseDelay: time.Second, MaxDelay: time.Second}, err: boom,
			want: driver.Decision{Action: driver.ActionRetry, Delay: time.Second, Counted: true},
		},
	} {
		random := 0.5
		if tt.policy.MaxDelay != 0 {
			random = 0.9
		}
		if got := driver.Next(tt.policy, &tt.msg, driver.Classify(tt.err), now, random); got != tt.want {
			t.Errorf("%s: %+v, want %+v", name, got, tt.want)
		}
	}
}

// A delay of Next is within the bounds of any valid policy.
func FuzzNext_delayIsWithinBounds(f *testing.F) {
	f.Add(int64(time.Second), 2.0, int64(time.Minute), 0.2, 3, 0.7)
	f.Add(int64(time.Millisecond), 1.5, int64(time.Second), 0.9, 40, 0.1)
	f.Fuzz(func(t *testing.T, delay int64, multiplier float64, maxDelay int64, jitter float64, attempt int, random float64) {
		p := inbox.RetryPolicy{BaseDelay: time.Duration(delay), Multiplier: multiplier, MaxDelay: time.Duration(maxDelay), Jitter: jitter}
		if driver.CheckRetry(p) != nil || math.IsNaN(random) {
			return
		}
		d := driver.Next(p, &inbox.Message{Attempt: attempt}, driver.Classify(inbox.Recoverable(errors.New("x"))), time.Now(), random)
		if d.Delay <= 0 || d.Delay > driver.RetryDefaults(p).MaxDelay {
			t.Errorf("%+v: delay %v", p, d.Delay)
		}
	})
}

func TestPolicyValidate(t *testing.T) {
	t.Parallel()
	if err := driver.CheckRetry(inbox.RetryPolicy{}); err != nil {
		t.Errorf("zero policy: %v", err)
	}
	if err := driver.CheckRetry(inbox.RetryPolicy{BaseDelay: 5 * time.Minute}); err != nil {
		t.Errorf("a long delay lifts the default bound: %v", err)
	}
	bad := inbox.RetryPolicy{MaxAttempts: -1, BaseDelay: time.Microsecond, Multiplier: math.NaN(), MaxDelay: -1, Jitter: 1, MaxAge: -1}
	err := driver.CheckRetry(bad)
	for _, field := range []string{"MaxAttempts", "BaseDelay", "Multiplier", "MaxDelay", "Jitter", "MaxAge"} {
		if err == nil || !strings.Contains(err.Error(), "RetryPolicy."+field+" ") {
			t.Errorf("%s is not named in %v", field, err)
		}
	}
}

func TestHorizon(t *testing.T) {
	t.Parallel()
	if got := driver.Horizon(inbox.RetryPolicy{}); got != 48*time.Hour {
		t.Errorf("default horizon %v", got)
	}
	if got := driver.Horizon(inbox.RetryPolicy{MaxAge: time.Second}); got != 37200*ms {
		t.Errorf("horizon of the retries %v", got)
	}
}

func TestClassify(t *testing.T) {
	t.Parallel()
	boom := errors.New("boom")
	retry := driver.Failure{Class: "default", Action: driver.ActionRetry, Counted: true}
	dead := driver.Failure{Class: "unrecoverable", Action: driver.ActionDead, Counted: true}
	recoverable := retry
	recoverable.Unlimited = true
	after := func(f driver.Failure, d time.Duration) driver.Failure { f.After = d; return f }
	class := func(f driver.Failure, c string) driver.Failure { f.Class = c; return f }

	for name, tt := range map[string]struct {
		err  error
		want driver.Failure
	}{
		"nil":                        {nil, driver.Failure{}},
		"unmarked":                   {boom, retry},
		"deadline":                   {context.DeadlineExceeded, retry},
		"unrecoverable":              {inbox.Unrecoverable(boom), dead},
		"wrapped":                    {fmt.Errorf("a: %w", inbox.Unrecoverable(boom)), dead},
		"outermost wins":             {inbox.Recoverable(inbox.Unrecoverable(boom)), recoverable},
		"outermost wins, reversed":   {inbox.Unrecoverable(inbox.RetryAfter(boom, time.Second)), dead},
		"retry after":                {inbox.RetryAfter(boom, time.Minute), after(recoverable, time.Minute)},
		"invalid":                    {inbox.Invalid(boom), class(dead, "validation")},
		"own class":                  {inbox.Classed(boom, "payment"), class(retry, "payment")},
		"own class, dead":            {inbox.Classed(inbox.Unrecoverable(boom), "payment"), class(dead, "payment")},
		"own class inside":           {inbox.Unrecoverable(inbox.Classed(boom, "payment")), class(dead, "payment")},
		"impossible class":           {inbox.Classed(boom, "No Class"), retry},
		"panic":                      {&base.Panic{Value: "x"}, retry},
		"panic with an error":        {&base.Panic{Value: inbox.Unrecoverable(boom)}, dead},
		"joined: any recoverable":    {errors.Join(inbox.Unrecoverable(boom), boom, inbox.RetryAfter(boom, 2), inbox.RetryAfter(boom, 3)), after(recoverable, 3)},
		"joined: all unrecoverable":  {errors.Join(inbox.Unrecoverable(boom), inbox.Invalid(boom)), class(dead, "validation")},
		"joined: some unrecoverable": {errors.Join(inbox.Unrecoverable(boom), boom), retry},
		"joined: nested":             {errors.Join(boom, fmt.Errorf("%w, %w", boom, inbox.Recoverable(boom))), recoverable},
		"joined inside a marker":     {inbox.Unrecoverable(errors.Join(boom, inbox.Recoverable(boom))), dead},
		"postponed":                  {inbox.Postpone(boom, 7), driver.Failure{Class: "default", Action: driver.ActionRetry, After: 7, Unlimited: true}},
		"unavailable":                {inbox.Unavailable(boom), driver.Failure{Class: "default", Action: driver.ActionReturn, Unavailable: true}},
		"unavailable, the sentinel":  {fmt.Errorf("a: %w", driver.ErrUnavailable), driver.Failure{Class: "default", Action: driver.ActionReturn, Unavailable: true}},
		"joined: unavailable":        {errors.Join(inbox.Unrecoverable(boom), inbox.Unavailable(boom)), driver.Failure{Class: "default", Action: driver.ActionReturn, Unavailable: true}},
		"draining":                   {inbox.Unrecoverable(fmt.Errorf("x: %w", inbox.ErrDraining)), driver.Failure{Class: "default", Action: driver.ActionReturn}},
	} {
		got := driver.Classify(tt.err)
		if !errors.Is(got.Err, tt.err) {
			t.Errorf("%s: Err = %v", name, got.Err)
		}
		got.Err = nil
		if got != tt.want {
			t.Errorf("%s: %+v, want %+v", name, got, tt.want)
		}
	}
}

type brokenError struct{ inner error }

func (e *brokenError) Error() string { return "broken: " + e.inner.Error() }
func (e *brokenError) Unwrap() error { return e.inner }

// A nil pointer returned as an error is a failure of its message and does not end the consumer.
func TestClassify_nilPointerError(t *testing.T) {
	t.Parallel()
	var broken *brokenError
	for _, err := range []error{broken, inbox.Unrecoverable(broken), errors.Join(inbox.ErrDraining, broken), &base.Panic{Value: broken}} {
		f := driver.Classify(err)
		if f.Class != driver.ClassDefault || f.Action != driver.ActionRetry || !f.Counted {
			t.Errorf("%T: %+v", err, f)
		}
		if letter := driver.NewDeadLetter(&inbox.Message{}, f, "c", time.Time{}); letter.Error == "" {
			t.Errorf("%T: the dead letter tells no error", err)
		}
	}
}

func TestMarkersKeepTheError(t *testing.T) {
	t.Parallel()
	boom := errors.New("boom")
	for name, err := range map[string]error{
		"Unrecoverable": inbox.Unrecoverable(boom), "Recoverable": inbox.Recoverable(boom), "Invalid": inbox.Invalid(boom),
		"RetryAfter": inbox.RetryAfter(boom, 1), "Postpone": inbox.Postpone(boom, 1), "Unavailable": inbox.Unavailable(boom),
		"Classed": inbox.Classed(boom, "x"),
	} {
		if err.Error() != "boom" || !errors.Is(err, boom) {
			t.Errorf("%s: %v", name, err)
		}
		if errors.Is(err, driver.ErrUnavailable) != (name == "Unavailable") {
			t.Errorf("%s: ErrUnavailable = %v", name, errors.Is(err, driver.ErrUnavailable))
		}
	}
	for name, err := range map[string]error{
		"Unrecoverable": inbox.Unrecoverable(nil), "Recoverable": inbox.Recoverable(nil), "Invalid": inbox.Invalid(nil),
		"RetryAfter": inbox.RetryAfter(nil, 1), "Postpone": inbox.Postpone(nil, 1), "Unavailable": inbox.Unavailable(nil),
		"Classed": inbox.Classed(nil, "x"),
	} {
		if err != nil {
			t.Errorf("%s(nil) = %v", name, err)
		}
	}
}

func TestValidClass(t *testing.T) {
	t.Parallel()
	for class, want := range map[string]bool{
		"default": true, "a.b-c_9": true, strings.Repeat("x", 64): true,
		"": false, "A": false, "a b": false, "ä": false, strings.Repeat("x", 65): false,
	} {
		if driver.ValidClass(class) != want {
			t.Errorf("ValidClass(%q) = %v", class, !want)
		}
	}
}

type payload struct {
	Number int            `json:"number"`
	At     time.Time      `json:"at"`
	More   map[string]any `json:"more"`
}

// decode decodes a body as a handler of T gets it.
func decode[T any](m *inbox.Message) (T, error) {
	return base.Into[T](func(v any) error { return inbox.DecodeJSON(m, v) })
}

func TestDecode(t *testing.T) {
	t.Parallel()
	for _, contentType := range []string{"", "application/json", "application/json; charset=utf-8", "application/cloudevents+json", "APPLICATION/JSON"} {
		m := &inbox.Message{Body: []byte(` {"number": 7, "new": [1]} `), ContentType: contentType}
		if got, err := decode[payload](m); err != nil || got.Number != 7 {
			t.Errorf("%q: %+v, %v", contentType, got, err)
		}
	}
	packed := gzipped([]byte("\xef\xbb\xbf{\"number\":7}"))
	for encoding, body := range map[string][]byte{"": []byte("\xef\xbb\xbf{\"number\":7}"), "utf-8": []byte(`{"number":7}`), "gzip": packed, "GZIP": packed} {
		if got, err := decode[payload](&inbox.Message{Body: body, ContentEncoding: encoding}); err != nil || got.Number != 7 {
			t.Errorf("content encoding %q: %+v, %v", encoding, got, err)
		}
	}
	if got, err := decode[*payload](&inbox.Message{Body: []byte(`{"number":7}`)}); err != nil || got.Number != 7 {
		t.Errorf("pointer: %+v, %v", got, err)
	}
}

func gzipped(body []byte) []byte {
	var packed bytes.Buffer
	w := gzip.NewWriter(&packed)
	_, _ = w.Write(body) // a bytes.Buffer takes everything
	_ = w.Close()
	return packed.Bytes()
}

func TestDecodeRefuses(t *testing.T) {
	t.Parallel()
	for name, m := range map[string]*inbox.Message{
		"nothing":      {},
		"null":         {Body: []byte(" null\n")},
		"broken":       {Body: []byte(`{"number":`)},
		"trailing":     {Body: []byte(`{"number":1} {"number":2}`)},
		"wrong type":   {Body: []byte(`{"number":"secret"}`)},
		"own decoding": {Body: []byte(`{"at":"secret"}`)},
		"not JSON":     {Body: []byte(`{}`), ContentType: "application/x-protobuf"},
		"bad type":     {Body: []byte(`{}`), ContentType: ";;"},
		"deep":         {Body: []byte(`{"more":{"a":` + strings.Repeat("[", 20_000) + strings.Repeat("]", 20_000) + `}}`)},
		"huge":         {Body: make([]byte, driver.MaxBodyBytes+1)},
		"no gzip":      {Body: []byte(`{}`), ContentEncoding: "gzip"},
		"gzip bomb":    {Body: gzipped(make([]byte, driver.MaxBodyBytes+1)), ContentEncoding: "gzip"},
		"cut gzip":     {Body: gzipped([]byte(`{"number":1}`))[:20], ContentEncoding: "gzip"},
	} {
		got, err := decode[payload](m)
		if f := driver.Classify(err); f.Class != driver.ClassValidation || f.Action != driver.ActionDead {
			t.Errorf("%s: error %v classified %+v", name, err, f)
			continue
		}
		if strings.Contains(err.Error(), "secret") || !reflect.ValueOf(got).IsZero() {
			t.Errorf("%s: error %q, value %+v", name, err, got)
		}
	}
}

func FuzzDecode(f *testing.F) {
	for _, seed := range []string{`{"number":1}`, `null`, ``, `[]`, `{"number":1e400}`, `{"at":"x"}`, "\xff"} {
		f.Add([]byte(seed), "application/json")
	}
	f.Fuzz(func(t *testing.T, body []byte, contentType string) {
		_, err := decode[payload](&inbox.Message{Body: body, ContentType: contentType})
		switch {
		case err == nil && !json.Valid(bytes.TrimPrefix(body, []byte("\xef\xbb\xbf"))):
			t.Errorf("accepted %q", body)
		case err != nil && driver.Classify(err).Class != driver.ClassValidation:
			t.Errorf("class of %v", err)
		}
	})
}

func TestMaxParked(t *testing.T) {
	t.Parallel()
	if n := driver.ConsumerDefaults(inbox.ConsumerConfig{}, "orders").MaxParked; n != 100_000 {
		t.Errorf("the default is %d", n)
	}
	err := driver.CheckConsumer(driver.ConsumerDefaults(inbox.ConsumerConfig{MaxParked: -1}, "orders"))
	if err == nil || !strings.Contains(err.Error(), "MaxParked -1") {
		t.Errorf("a negative one: %v", err)
	}
}

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }
