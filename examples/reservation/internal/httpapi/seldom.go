package httpapi

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// seldomEvery is the time between two lines of a kind.
const seldomEvery = 30 * time.Second

// seldom logs a fault that repeats once in a while, and says how often it came meanwhile: during an
// outage every request meets the same fault.
type seldom struct {
	log *slog.Logger

	mu sync.Mutex
	// lines are those of the last seldomEvery, by kind.
	lines map[string]*repeatedLine
}

// repeatedLine is the latest line that was not written, and how many were not.
type repeatedLine struct {
	repeats int
	write   func(repeats int)
}

func newSeldom(log *slog.Logger) *seldom {
	return &seldom{log: log, lines: map[string]*repeatedLine{}}
}

// write logs the first line of a kind at once. Of those that follow, it logs the latest after seldomEvery.
// The caller bounds how many kinds there are.
func (s *seldom) write(ctx context.Context, level slog.Level, msg, kind string, attrs ...slog.Attr) {
	ctx = context.WithoutCancel(ctx)
	write := func(repeats int) {
		s.log.LogAttrs(ctx, level, msg, append(attrs, slog.Int("repeats", repeats))...)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if line, ok := s.lines[kind]; ok {
		line.repeats++
		line.write = write
		return
	}
	write(0)
	s.lines[kind] = &repeatedLine{}
	time.AfterFunc(seldomEvery, func() { s.conclude(kind) })
}

// conclude writes what was held back of a kind; without anything, the next line is a first one again.
func (s *seldom) conclude(kind string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	line := s.lines[kind]
	if line.repeats == 0 {
		delete(s.lines, kind)
		return
	}
	line.write(line.repeats)
	s.lines[kind] = &repeatedLine{}
	time.AfterFunc(seldomEvery, func() { s.conclude(kind) })
}
