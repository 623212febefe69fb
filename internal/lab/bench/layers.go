package main

import (
	"math"
	"strings"

	"github.com/google/pprof/profile"
)

// layers are what this process's own time went to during a stretch, in percent of it.
type layers [layerCount]float64

const (
	ofHoldfast = iota
	ofDrivers
	ofKernel // system calls, for which the caller does not matter: it is what sending, receiving and waking cost
	ofRuntime
	ofContenders // the code of the comparison: raw clients, load, and what counts
	ofPeers      // their modules and all others
	layerCount
)

var layerNames = [layerCount]string{"holdfast", "drivers", "system calls", "runtime", "the bench", "other modules"}

// modules tell whose function it is by what its name begins with: the first that fits.
var modules = []struct {
	prefix string
	layer  int
}{
	{"main.", ofContenders},
	{"github.com/holdfast-go/holdfast/internal/lab", ofContenders},
	{"github.com/holdfast-go/holdfast/internal/testenv", ofContenders},
	{"github.com/holdfast-go/holdfast", ofHoldfast},
	{"github.com/jackc/", ofDrivers},
	{"github.com/rabbitmq/amqp091-go", ofDrivers},
	{"github.com/redis/go-redis", ofDrivers},
}

// layersOf divides a CPU profile. The standard library and OpenTelemetry work for their callers: memory that a driver asks
// for is the driver's, a span is ours. What has no caller in a module is the runtime's: the scheduler, the garbage collector,
// and net/http's connections.
func layersOf(data []byte) (l layers, err error) {
	p, err := profile.ParseData(data)
	if err != nil {
		return l, err
	}
	total := 0.0
	for _, s := range p.Sample {
		used := float64(s.Value[len(s.Value)-1])
		l[layerOf(s)] += used
		total += used
	}
	for i := range l {
		l[i] *= 100 / total // NaN where the profile is empty
	}
	return l, nil
}

func layerOf(s *profile.Sample) int {
	for i, name := range functions(s) {
		if i == 0 && isSystemCall(name) {
			return ofKernel
		}
		if layer, ok := moduleOf(name); ok {
			return layer
		}
	}
	return ofRuntime
}

// functions are the names on a stack, from the one that ran to those that called it.
func functions(s *profile.Sample) (names []string) {
	for _, location := range s.Location {
		for _, line := range location.Line { // inlined functions first
			names = append(names, line.Function.Name)
		}
	}
	return names
}

func isSystemCall(function string) bool {
	for _, prefix := range []string{"internal/runtime/syscall", "syscall.", "runtime.futex", "runtime.usleep", "runtime.tgkill", "runtime.madvise"} {
		if strings.HasPrefix(function, prefix) {
			return true
		}
	}
	return false
}

func moduleOf(function string) (layer int, ok bool) {
	for _, m := range modules {
		if strings.HasPrefix(function, m.prefix) {
			return m.layer, true
		}
	}
	if strings.HasPrefix(function, "go.opentelemetry.io/otel") {
		return 0, false
	}
	host, _, isPath := strings.Cut(function, "/")
	return ofPeers, isPath && strings.Contains(host, ".")
}

// unprofiled are the layers of a row whose stretch was too short for a profile.
func unprofiled(l layers) bool { return math.IsNaN(l[ofHoldfast]) || l == (layers{}) }
