package main

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestScaleWantsItsOwnServers(t *testing.T) {
	t.Setenv(testenv.RedisVar, "redis://127.0.0.1:1")
	for _, p := range scaleWorkload().parts {
		if err := p.run(t.Context(), &bench{}); err == nil || !strings.Contains(err.Error(), "unset HOLDFAST_TEST_") {
			t.Errorf("%s: %v, want to be told to unset it", p.name, err)
		}
	}
}

func TestOnly(t *testing.T) {
	t.Parallel()
	some := table{contenders: []contender{{"one", func(context.Context, time.Duration) (sample, error) {
		return sample{0, 1, 2, 3, 4, 5}, nil
	}}}}.only(0, 4)
	got, err := some.contenders[0].run(t.Context(), time.Second)
	if fmt.Sprint(got) != "[0 4]" || err != nil || len(some.columns) != 2 || some.columns[1].name != sampleColumns[4].name {
		t.Errorf("%v %v (%v), want the figures and columns 0 and 4", got, some.columns, err)
	}
}

// Without a private server of a kind there is no figure for it, and no zero.
func TestStopwatchWithoutServers(t *testing.T) {
	t.Parallel()
	var watch stopwatch
	watch.start()
	watch.stop()
	got := watch.sample(10)
	if len(got) != len(sampleColumns) || written(got[2], 1) != "-" || written(got[5], 0) != "-" || written(got[1], 1) == "-" {
		t.Errorf("%v, want no figures of servers", got)
	}
}
