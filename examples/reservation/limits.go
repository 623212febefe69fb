package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/metrics"
	"strconv"
	"strings"
	"time"
)

// limits end a process as a signal does, for its supervisor to start a new one. 0 is no limit.
type limits struct {
	time     time.Duration
	messages int64
	memory   size
}

// looksAtLimits is the time between two looks: cheap ones.
const looksAtLimits = 100 * time.Millisecond

// within returns a context that ends with ctx or at a limit.
func (l limits) within(ctx context.Context, h *handled) (context.Context, func()) {
	ctx, stop := context.WithCancel(ctx)
	if l == (limits{}) {
		return ctx, stop
	}
	began := time.Now()
	go func() {
		looks := time.NewTicker(looksAtLimits)
		defer looks.Stop()
		for {
			if reached := l.reached(time.Since(began), h.Load(), memoryInUse()); reached != "" {
				slog.InfoContext(ctx, "reservation: a limit is reached, the process ends", slog.String("limit", reached))
				stop()
			}
			select {
			case <-ctx.Done():
				return
			case <-looks.C:
			}
		}
	}()
	return ctx, stop
}

// reached names the limit that is reached, if one is.
func (l limits) reached(ran time.Duration, messages int64, memory size) string {
	switch {
	case l.time > 0 && ran >= l.time:
		return fmt.Sprintf("it has run for %v", ran.Round(time.Millisecond))
	case l.messages > 0 && messages >= l.messages:
		return fmt.Sprintf("it has handled %d messages", messages)
	case l.memory > 0 && memory > l.memory:
		return fmt.Sprintf("it holds %d bytes of memory", memory)
	}
	return ""
}

// memoryInUse is what the Go runtime holds, without what it has given back to the system.
func memoryInUse() size {
	held := []metrics.Sample{{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}}
	metrics.Read(held)
	return size(held[0].Value.Uint64() - held[1].Value.Uint64())
}

// size is a number of bytes, in flags with K, M or G behind it.
type size uint64

func (s *size) String() string { return strconv.FormatUint(uint64(*s), 10) }

// Set implements flag.Value.
func (s *size) Set(text string) error {
	shift := 0
	for suffix, n := range map[string]int{"K": 10, "M": 20, "G": 30} {
		if number, ok := strings.CutSuffix(text, suffix); ok {
			text, shift = number, n
			break
		}
	}
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil {
		return errors.New("want bytes, or a number with K, M or G behind it")
	}
	*s = size(n << shift)
	return nil
}
