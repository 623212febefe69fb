package main

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"runtime/pprof"
)

// profiler takes a CPU profile of the stretch whose shares are taken. A nil one takes none.
type profiler struct {
	folder string // also writes each profile as a file there; "" for none

	armed bool
	err   error // of the last start
	taken bytes.Buffer
}

// arm says whether the next run is profiled.
func (p *profiler) arm(armed bool) {
	if p != nil {
		p.armed = armed
		p.taken.Reset()
	}
}

// start begins the profile anew: a run that delimits its stretch itself leaves out what came before.
func (p *profiler) start() {
	if p == nil || !p.armed {
		return
	}
	pprof.StopCPUProfile()
	p.taken.Reset()
	p.err = pprof.StartCPUProfile(&p.taken)
}

func (p *profiler) stop() {
	if p != nil && p.armed {
		pprof.StopCPUProfile()
	}
}

// take returns the layers of the profile, and none if there is no profile.
func (p *profiler) take(name string) (l layers, err error) {
	if p == nil || !p.armed {
		return l, nil
	}
	if p.err != nil {
		return l, p.err
	}
	if p.folder != "" {
		if err := os.WriteFile(p.file(name), p.taken.Bytes(), 0o644); err != nil {
			return l, err
		}
	}
	return layersOf(p.taken.Bytes())
}

// file is where the profile of that name is written.
func (p *profiler) file(name string) string {
	return filepath.Join(p.folder, regexp.MustCompile(`[^a-zA-Z0-9]+`).ReplaceAllString(name, "-")+".pprof")
}
