package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

// signalError is the cause of a context that a signal cancelled.
type signalError struct{ signal syscall.Signal }

func (e *signalError) Error() string { return e.signal.String() }

func (e *signalError) exitCode() int { return 128 + int(e.signal) }

// untilSignal returns a context that ends at SIGINT, at SIGTERM, or when the go command that
// runs this program is gone: it does not pass a SIGTERM on, and nobody tells us when it is killed.
func untilSignal(parent context.Context) (ctx context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(parent)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	go func() {
		goPid := goCommand()
		alive := time.NewTicker(200 * time.Millisecond)
		defer alive.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case sig := <-signals:
				cancel(&signalError{sig.(syscall.Signal)})
			case <-alive.C:
				if goPid != 0 && os.Getppid() != goPid {
					cancel(&signalError{syscall.SIGTERM})
				}
			}
		}
	}()
	return ctx, func() {
		signal.Stop(signals)
		cancel(nil)
	}
}

// goCommand returns the id of the parent process if that is the go command, else 0.
func goCommand() int {
	parent := os.Getppid()
	name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", parent))
	if err != nil || strings.TrimSpace(string(name)) != "go" {
		return 0
	}
	return parent
}
