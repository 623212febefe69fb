package runloop

import "runtime/metrics"

// MemoryInUse returns the bytes that the Go runtime holds and has not given back to the system.
func MemoryInUse() uint64 {
	samples := []metrics.Sample{
		{Name: "/memory/classes/total:bytes"},
		{Name: "/memory/classes/heap/released:bytes"},
	}
	metrics.Read(samples)
	return samples[0].Value.Uint64() - samples[1].Value.Uint64()
}
