package driver_test

import (
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
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

func TestSteps(t *testing.T) {
	t.Parallel()
	steps := driver.Steps(inbox.RetryPolicy{})
	if len(steps) != 20 || steps[0] != 800*ms || steps[19] != time.Minute {
		t.Errorf("default steps = %v", steps)
	}
	for name, tt := range map[string]struct {
		policy inbox.RetryPolicy
		want   []time.Duration
	}{
		"no jitter":   {inbox.RetryPolicy{Jitter: -1, MaxDelay: 4 * time.Second}, []time.Duration{time.Second, 2 * time.Second, 4 * time.Second}},
		"no growth":   {inbox.RetryPolicy{Multiplier: 1}, []time.Duration{800 * ms, time.Second, 1200 * ms}},
		"short delay": {inbox.RetryPolicy{BaseDelay: ms, MaxDelay: 2 * ms}, []time.Duration{ms, 2 * ms}},
	} {
		if got := driver.Steps(tt.policy); !slices.Equal(got, tt.want) {
			t.Errorf("%s: %v, want %v", name, got, tt.want)
		}
	}
}

// Every delay that Next can choose has a queue, whatever the valid policy.
func FuzzNextStaysOnSteps(f *testing.F) {
	f.Add(int64(time.Second), 2.0, int64(time.Minute), 0.2, 3, 0.7)
	f.Add(int64(time.Millisecond), 1.5, int64(time.Second), 0.9, 40, 0.1)
	f.Fuzz(func(t *testing.T, delay int64, multiplier float64, maxDelay int64, jitter float64, attempt int, random float64) {
		p := inbox.RetryPolicy{BaseDelay: time.Duration(delay), Multiplier: multiplier, MaxDelay: time.Duration(maxDelay), Jitter: jitter}
		if driver.CheckRetry(p) != nil || math.IsNaN(random) {
			return
		}
		steps := driver.Steps(p)
		if len(steps) == 0 || len(steps) > 60 {
			t.Fatalf("%d steps", len(steps))
		}
		d := driver.Next(p, &inbox.Message{Attempt: attempt}, driver.Classify(inbox.Recoverable(errors.New("x"))), time.Now(), random)
		if !slices.Contains(steps, d.Delay) || d.Delay <= 0 || d.Delay > driver.RetryDefaults(p).MaxDelay {
			t.Errorf("%+v: delay %v is not in %v", p, d.Delay, steps)
		}
	})
}

func TestCover(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ d, step, rest time.Duration }{
		{0, 800 * ms, 0},
		{time.Second, time.Second, 0},
		{time.Second + 1, 1200 * ms, 0},
		{time.Minute, time.Minute, 0},
		{38_500 * ms, 38_400 * ms, 100 * ms}, // the next one is 48 s
		{150 * time.Second, time.Minute, 90 * time.Second},
	} {
		step, rest := driver.Cover(inbox.RetryPolicy{}, tt.d)
		if step != tt.step || rest != tt.rest {
			t.Errorf("Cover(%v) = %v, %v; want %v, %v", tt.d, step, rest, tt.step, tt.rest)
		}
	}
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
	if err := driver.CheckRetry(inbox.RetryPolicy{Multiplier: 1.01}); err == nil {
		t.Error("hundreds of steps are accepted")
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
