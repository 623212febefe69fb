package main

import (
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// fakeTime returns the library that sets the clock of a process it is loaded into, of Debian's package libfaketime; ""
// where there is none. It reaches programs that ask the C library for the time: Postgres and Redis do, those of Go do not.
func fakeTime() string {
	for _, pattern := range []string{"/usr/lib/*/faketime/libfaketime.so.1", "/usr/lib/faketime/libfaketime.so.1"} {
		if found, _ := filepath.Glob(pattern); len(found) > 0 { // the only error is a malformed pattern
			return found[0]
		}
	}
	return ""
}

// openClock has the pair's servers read how much their clock is wrong.
func (p *pair) openClock() error {
	p.clock = filepath.Join(p.s.dir, string(p.spec.Kind)+".clock")
	// Redis' jemalloc asks for the time before libfaketime is ready for that, and hangs: the C library's own malloc,
	// named before it, takes its place.
	p.spec.Env = append(p.spec.Env, "LD_PRELOAD="+fakeTime()+":libc.so.6", "FAKETIME_TIMESTAMP_FILE="+p.clock,
		"FAKETIME_CACHE_DURATION=1", "FAKETIME_DONT_FAKE_MONOTONIC=1")
	return p.setClock(0)
}

// setClock makes the clock of both servers so much wrong, within two seconds.
func (p *pair) setClock(wrong time.Duration) error {
	// A new file in place of the old one: a server that reads it meanwhile sees one or the other.
	fresh := p.clock + ".new"
	if err := os.WriteFile(fresh, fmt.Appendf(nil, "%+d\n", int64(wrong/time.Second)), 0o644); err != nil {
		return err
	}
	return os.Rename(fresh, p.clock)
}
