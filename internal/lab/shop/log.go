package shop

import (
	"bytes"
	"strings"
	"sync"
)

// longestLog is how much of a log is kept, and at most twice as much: a fault may cost many lines.
const longestLog = 256 << 10

// log keeps the end of what processes log, and counts their complaints.
type log struct {
	mu         sync.Mutex
	text       []byte
	complaints int
}

// Write takes what a process logs, mostly in whole lines: a complaint whose level is cut in two is not counted.
func (l *log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.complaints += bytes.Count(p, []byte("level=WARN")) + bytes.Count(p, []byte("level=ERROR"))
	l.text = append(l.text, p...)
	if len(l.text) > 2*longestLog {
		l.text = append([]byte(nil), l.text[len(l.text)-longestLog:]...)
	}
	return len(p), nil
}

func (l *log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return string(l.text)
}

func (l *log) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.complaints
}

// announcement is the standard output of a shop: it finds where that one listens.
type announcement struct {
	said  strings.Builder
	found func(url string) // nil once it was called
}

func (a *announcement) Write(p []byte) (int, error) {
	if a.found == nil {
		return len(p), nil
	}
	a.said.Write(p)
	_, after, ok := strings.Cut(a.said.String(), "listening on ")
	if url, _, whole := strings.Cut(after, " "); ok && whole {
		a.found(url)
		a.found = nil
	}
	return len(p), nil
}
