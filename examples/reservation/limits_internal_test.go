package main

import (
	"io"
	"strings"
	"testing"
	"time"
)

func TestLimitsReached(t *testing.T) {
	t.Parallel()
	all := limits{time: time.Minute, messages: 10, memory: 1 << 20}
	for _, tc := range []struct {
		l        limits
		ran      time.Duration
		messages int64
		memory   size
		want     string
	}{
		{all, time.Minute - 1, 9, 1 << 20, ""},
		{all, time.Minute, 0, 0, "1m0s"},
		{all, 0, 11, 0, "11 messages"},
		{all, 0, 0, 1<<20 + 1, "1048577 bytes"},
		{limits{}, 1 << 60, 1 << 60, 1 << 60, ""},
	} {
		if got := tc.l.reached(tc.ran, tc.messages, tc.memory); tc.want == "" && got != "" || !strings.Contains(got, tc.want) {
			t.Errorf("%+v: %q", tc, got)
		}
	}
	if held := memoryInUse(); held < 1<<20 || held > 1<<40 {
		t.Errorf("the process holds %d bytes", held)
	}
}

func TestLimitFlags(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]size{"0": 0, "1024": 1024, "3K": 3 << 10, "256M": 256 << 20, "2G": 2 << 30} {
		c, err := parseConfig([]string{"-memory-limit=" + text}, nowhere, io.Discard)
		if err != nil || c.limits.memory != want {
			t.Errorf("-memory-limit=%s is %d, error %v", text, c.limits.memory, err)
		}
	}
	for flags, part := range map[string]string{
		"-memory-limit=-1": "want bytes", "-memory-limit=M": "want bytes", "-memory-limit=1KM": "want bytes", "-memory-limit=99999999999G": "want bytes",
		"-time-limit=-1s": "negative", "-message-limit=-1": "negative", "-message-limit=1": "counts no messages",
		"-backend=services -role=api -message-limit=1": "counts no messages",
	} {
		if _, err := parseConfig(strings.Fields(flags), nowhere, io.Discard); err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("%s: %v", flags, err)
		}
	}
}
