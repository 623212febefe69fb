package main

import (
	"bytes"
	"fmt"
	"io"
	"sync"
	"time"
)

// progress counts the packages that `go list -v` names on its standard error and prints the number every ten seconds.
// All other lines are printed as they are.
type progress struct {
	to      io.Writer
	began   time.Time
	ticker  *time.Ticker
	stopped chan struct{}

	mu       sync.Mutex
	part     []byte // a line that has not ended
	compiled int
}

func newProgress(to io.Writer) *progress {
	p := &progress{to: to, began: time.Now(), ticker: time.NewTicker(10 * time.Second), stopped: make(chan struct{})}
	go func() {
		for {
			select {
			case <-p.stopped:
				return
			case <-p.ticker.C:
				p.mu.Lock()
				fmt.Fprintf(p.to, "compile: %d packages so far, %.0f s\n", p.compiled, time.Since(p.began).Seconds())
				p.mu.Unlock()
			}
		}
	}()
	return p
}

// Write takes output of the go command.
func (p *progress) Write(text []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.part = append(p.part, text...)
	for {
		line, rest, ok := bytes.Cut(p.part, []byte("\n"))
		if !ok {
			return len(text), nil
		}
		p.part = rest
		if len(line) > 0 && !bytes.ContainsAny(line, " \t") {
			p.compiled++
		} else if _, err := fmt.Fprintf(p.to, "%s\n", line); err != nil {
			return 0, err
		}
	}
}

// stop ends the printing. A line that has not ended is printed.
func (p *progress) stop() {
	p.ticker.Stop()
	close(p.stopped)
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.part) > 0 {
		fmt.Fprintf(p.to, "%s\n", p.part)
	}
}
