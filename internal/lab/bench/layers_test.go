package main

import (
	"context"
	"crypto/sha256"
	"io"
	"math"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/pprof/profile"
	"github.com/holdfast-go/holdfast/internal/lab/load"
)

func TestLayers(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		stack []string // from the function that ran
		want  int
	}{
		"ours":                     {[]string{"github.com/holdfast-go/holdfast/outbox.(*Relay).round", "main.drain"}, ofHoldfast},
		"memory for a driver":      {[]string{"runtime.mallocgc", "bytes.growSlice", "github.com/jackc/pgx/v5/pgproto3.(*Bind).Encode", "github.com/holdfast-go/holdfast/outbox/outboxpgx.(*source).Claim"}, ofDrivers},
		"a system call":            {[]string{"internal/runtime/syscall/linux.Syscall6", "syscall.write", "github.com/redis/go-redis/v9.(*Client).Process"}, ofKernel},
		"a thread that is woken":   {[]string{"runtime.futex", "runtime.notewakeup", "github.com/holdfast-go/holdfast/inbox.(*engine).run"}, ofKernel},
		"the garbage collector":    {[]string{"runtime.scanobject", "runtime.gcDrain"}, ofRuntime},
		"net/http's own":           {[]string{"net/textproto.(*Reader).ReadMIMEHeader", "net/http.(*conn).serve"}, ofRuntime},
		"the bench, by its binary": {[]string{"crypto/sha256.block", "main.raw", "github.com/jackc/pgx/v5.(*Conn).Exec"}, ofContenders},
		"the bench, by its module": {[]string{"github.com/holdfast-go/holdfast/internal/lab/load.Drive"}, ofContenders},
		"a span of ours":           {[]string{"runtime.mallocgc", "go.opentelemetry.io/otel/trace.NewSpanStartConfig", "github.com/holdfast-go/holdfast/outbox.(*Relay).round"}, ofHoldfast},
		"a peer":                   {[]string{"runtime.memmove", "github.com/riverqueue/river.(*Client).work"}, ofPeers},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var s profile.Sample
			for _, function := range tc.stack {
				s.Location = append(s.Location, &profile.Location{Line: []profile.Line{{Function: &profile.Function{Name: function}}}})
			}
			if got := layerOf(&s); got != tc.want {
				t.Errorf("%s, want %s", layerNames[got], layerNames[tc.want])
			}
		})
	}
}

// The profile is of the last round, and of the stretch that a run delimits in it. Not parallel: a process has one profiler.
func TestProfileOfAStretch(t *testing.T) {
	b := &bench{out: io.Discard, length: time.Millisecond, rounds: 2, profiler: &profiler{folder: t.TempDir()}}
	spend := func() {
		for used := load.CPUTime(); load.CPUTime()-used < 200*time.Millisecond; {
			sha256.Sum256(make([]byte, 1000))
		}
	}
	runs := 0
	r, err := b.measure(t.Context(), table{
		title: "profiled", columns: []column{{name: "tx/s"}},
		contenders: []contender{
			{"busy", func(context.Context, time.Duration) (sample, error) {
				spend()
				return sample{1}, nil
			}},
			{"busy in the first round", func(context.Context, time.Duration) (sample, error) {
				if runs++; runs == 2 { // the first run warms up
					spend()
				}
				return sample{1}, nil
			}},
			{"busy before its stretch", func(context.Context, time.Duration) (sample, error) {
				spend()
				b.observe()()
				return sample{1}, nil
			}},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	sum := 0.0
	for _, percent := range r.layers["busy"] {
		sum += percent
	}
	if math.Abs(sum-100) > 0.1 || unprofiled(r.layers["busy"]) {
		t.Errorf("%v adds up to %v %%", r.layers["busy"], sum)
	}
	for name, want := range map[string]bool{"busy": true, "busy in the first round": false, "busy before its stretch": false} {
		if got := hashes(t, b.profiler.file("profiled "+name)); got != want {
			t.Errorf("%s: its profile shows it hashing: %v, want %v", name, got, want)
		}
	}
}

// hashes reports whether the profile in a file has a sample of SHA-256.
func hashes(t *testing.T, file string) bool {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	p, err := profile.ParseData(data)
	if err != nil {
		t.Fatal(err)
	}
	return slices.ContainsFunc(p.Sample, func(s *profile.Sample) bool {
		return slices.ContainsFunc(functions(s), func(name string) bool { return strings.Contains(name, "sha256") })
	})
}
