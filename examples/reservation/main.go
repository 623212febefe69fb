// Command reservation is a ticket shop that uses all of Holdfast: events
// with numbered seats that users hold, confirm or lose. Without arguments it
// keeps everything in memory. See the README for real servers, the roles
// of several processes, and the commands of an operator.
package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"runtime/metrics"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/httpapi"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/memory"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/web"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/history"
	"github.com/holdfast-go/holdfast/modules/service"
	"github.com/holdfast-go/holdfast/ratelimit"
)

// The exit codes of the shop. Package command documents those of commands.
const (
	exitOK     = 0
	exitFailed = 1
	exitUsage  = 2
)

func main() {
	os.Exit(run(service.Signals(), os.Args[1:], os.Getenv, os.Stdout, os.Stderr))
}

// run is the program; it returns the exit code.
func run(ctx context.Context, args []string, getenv func(string) string, stdout, stderr io.Writer) int {
	cfg, err := parseConfig(args, getenv, stdout)
	if errors.Is(err, flag.ErrHelp) {
		return exitOK
	}
	if err != nil {
		fmt.Fprintln(stderr, "reservation: "+oneLine(err))
		return exitUsage
	}
	slog.SetDefault(slog.New(slog.NewTextHandler(stderr, nil)))
	if len(cfg.command) > 0 {
		return operate(ctx, cfg, stdout, stderr)
	}
	if err := serve(ctx, cfg, stdout); err != nil {
		fmt.Fprintln(stderr, "reservation: "+oneLine(err))
		return exitFailed
	}
	return exitOK
}

// must returns the result of a constructor. It fails only for a wrong Config, which is a mistake in this program.
func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// After a signal the running requests have stopTimeout, then consumer and sweeper, then the relay. After that,
// connections have closeTimeout to close.
const (
	stopTimeout  = 18 * time.Second
	closeTimeout = 2 * time.Second
)

// runner is a part of the process that runs until it is stopped.
type runner interface {
	Run(ctx context.Context) error
	Ready(ctx context.Context) error
}

// backend is the shop on one kind of servers, or on none.
type backend struct {
	shop    httpapi.Backend
	keys    driver.Store // nil: left out
	limiter limiter      // nil: left out
	// group has the parts of the role.
	group *service.Group
	// handled counts the messages of the parts.
	handled *handled
	// ready answers readiness probes.
	ready http.Handler
	// operator lists all parts.
	operator operator.Config
	// flow counts the work for the shop's page, and backlog the waiting messages.
	flow    flow.Flow
	backlog func(context.Context) (flow.Backlog, error)
	// trials inject faults; nil: none. Only a shop in memory has outages.
	trials  web.Trials
	outages []web.Server
	close   func()
}

// limiter is a limiter with Peek.
type limiter interface {
	ratelimit.Limiter
	web.Peeker
}

// serve runs the shop in its role until ctx ends, or a limit of the process is reached.
func serve(ctx context.Context, cfg config, stdout io.Writer) error {
	metrics, stop, err := serveMetrics()
	if err != nil {
		return err
	}
	defer stop()
	flush, err := exportTraces(ctx, cfg)
	if err != nil {
		return err
	}
	defer flush()
	b, err := open(ctx, cfg)
	if ctx.Err() != nil && err != nil {
		return nil // stopped before it started
	}
	if err != nil {
		return err
	}
	defer b.close()
	ctx, end := cfg.limits.within(ctx, b.handled)
	defer end()
	if cfg.addr == "" {
		fmt.Fprintf(stdout, "reservation: running (backend %s, role %s)\n", cfg.backend, cfg.role)
		return b.group.Run(ctx)
	}

	front, err := newFront(ctx, cfg, b, metrics)
	if err != nil {
		return err
	}
	front.announce(stdout, cfg)
	front.join(b.group)
	defer front.close()
	return b.group.Run(ctx)
}

// newGroup returns a group with the parts of the role. The parts that need the broker set it up first; requests are
// served meanwhile.
func newGroup(cfg config, sweeper, consumer, relay runner, broker ...func(context.Context) error) *service.Group {
	group := &service.Group{DrainDelay: cfg.drain, StopTimeout: stopTimeout}
	if cfg.runs(roleSweeper) {
		group.Add(roleSweeper, sweeper)
	}
	if cfg.runs(roleConsumer) {
		group.Add(roleConsumer, consumer, broker...)
	}
	if cfg.runs(roleRelay) {
		group.Last(roleRelay, relay, broker...)
	}
	return group
}

// open makes the configured back end, ready to run.
func open(ctx context.Context, cfg config) (*backend, error) {
	switch cfg.backend {
	case backendMemory:
		return openMemory(cfg)
	case backendContainers:
		containers, err := startContainers(ctx, &cfg)
		if err != nil {
			return nil, err
		}
		b, err := openServices(ctx, cfg)
		if err != nil {
			containers.stop()
			return nil, err
		}
		closeServices := b.close
		b.close = func() {
			closeServices()
			containers.stop()
		}
		return b, nil
	default:
		return openServices(ctx, cfg)
	}
}

func openMemory(cfg config) (*backend, error) {
	tracker := flow.New()
	parts, err := memory.Open(memory.Config{Schedule: cfg.sweep, Flow: tracker})
	if err != nil {
		return nil, err
	}
	checks := map[string]func(context.Context) error{}
	var outages []web.Server
	for _, server := range parts.Demo.Servers() {
		outages = append(outages, server)
		if server != parts.Demo.RabbitMQ { // requests are served without the broker
			checks[server.Name()] = server.Ready
		}
	}
	group := newGroup(cfg, parts.Sweeper, parts.Consumer, parts.Relay)
	operated := memoryOperator(cfg, parts)
	group.Add("history", must(history.New(operated)))
	b := &backend{
		shop: parts.Shop, keys: parts.Keys, limiter: parts.Limiter, group: group, ready: group.Ready(checks),
		operator: operated, handled: &handled{},
		flow: tracker, backlog: parts.Demo.Backlog, close: func() {},
	}
	if cfg.trials {
		b.trials, b.outages = parts.Demo, outages
	}
	return b, nil
}

// limits end a process like a signal, so that its supervisor starts a new one. 0 is no limit.
type limits struct {
	time     time.Duration
	messages int64
	memory   size
}

// looksAtLimits is the time between two checks of the limits.
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
				slog.InfoContext(ctx, "reservation: process limit reached; stopping", slog.String("limit", reached))
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

// reached returns the limit that is reached; empty: none.
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

// memoryInUse returns the memory of the Go runtime, without memory that was returned to the system.
func memoryInUse() size {
	held := []metrics.Sample{{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}}
	metrics.Read(held)
	return size(held[0].Value.Uint64() - held[1].Value.Uint64())
}

// size is a number of bytes. In flags K, M or G may follow it.
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
		return errors.New("want bytes, or a number followed by K, M or G")
	}
	*s = size(n << shift)
	return nil
}

// newID returns a UUID v7: ids sort by their time.
func newID() string { return uuid.Must(uuid.NewV7()).String() }

// printTrial prints three lines to paste into a shell.
func printTrial(w io.Writer, url string) {
	// An answer starts with {"id":" and the 36 characters of the id, which the next line extracts.
	const line1 = `EVENT=$(curl -sS %s/api/events -d '{"name":"Concert","seats":50}' %s); echo "$EVENT"`
	const line2 = `HOLD=$(curl -sS %s/api/reservations -d '{"event_id":"'${EVENT:7:36}'","quantity":2}' %s); echo "$HOLD"`
	const line3 = `curl -i %s/api/reservations/${HOLD:7:36}/confirm -d '{}' %s`
	fmt.Fprintln(w, "Try these three lines in bash or zsh, in this order:")
	for _, line := range []string{line1, line2, line3} {
		headers := "-H X-Mock-User-Id:ada -H Idempotency-Key:" + newKey() + " -H Content-Type:application/json"
		fmt.Fprintf(w, "  "+line+"\n", url, headers)
	}
}

// newKey returns an idempotency key: a UUID v4 without hyphens.
func newKey() string {
	id := uuid.Must(uuid.NewRandomFromReader(rand.Reader))
	return hex.EncodeToString(id[:])
}
