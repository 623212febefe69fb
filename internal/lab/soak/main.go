// Command soak shows that what runs for long stays as it is, and that what is large costs no more:
//
//	go run ./internal/lab/soak
//
// runs the ticket shop, each role as a process, on private servers for half an hour at half of the capacity that
// it measures first, and decides whether memory, goroutines, connections, files, tables and queues are flat.
// -part runs another part: waiting drains an outbox with ten million messages; snapshot holds an old snapshot for
// ten minutes beside writers and a relay; dedup has the inbox record messages beside fifty million entries. Flags
// make each of them smaller.
//
// The machine may be shared, so that rates per second say little. What decides is processor time per operation: of
// this process ("client"), and of Postgres with all its children. A report is printed as text; -json and
// -markdown write it into files. The exit code is 1 if something is not as it should be.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"syscall"
	"time"
)

var quiet = slog.New(slog.DiscardHandler)

// sizes are what flags set.
type sizes struct {
	minutes  float64
	clients  int
	messages int64
	rows     int64
	body     int
	secs     float64
}

func (s sizes) stretch() time.Duration { return time.Duration(s.secs * float64(time.Second)) }
func (s sizes) length() time.Duration  { return time.Duration(s.minutes * float64(time.Minute)) }

// parts are what -part chooses from.
var parts = map[string]func(context.Context, sizes, *report) error{
	"shop": soakShop, "waiting": soakWaiting, "snapshot": soakSnapshot, "dedup": soakDedup,
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "soak:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	var s sizes
	var part, jsonPath, markdownPath string
	flags := flag.NewFlagSet("soak", flag.ContinueOnError)
	flags.StringVar(&part, "part", "shop", "shop, waiting, snapshot or dedup")
	flags.Float64Var(&s.minutes, "minutes", 0, "how many `minutes` the shop runs or the snapshot is held (default 30 and 10)")
	flags.IntVar(&s.clients, "clients", 50, "clients of the shop, or writers at a time")
	flags.Int64Var(&s.messages, "messages", 10_000_000, "`number` of messages that wait")
	flags.Int64Var(&s.rows, "rows", 50_000_000, "`number` of entries that the inbox has")
	flags.IntVar(&s.body, "body", 512, "`bytes` of a message")
	flags.Float64Var(&s.secs, "secs", 20, "length of one measurement in `seconds`")
	flags.StringVar(&jsonPath, "json", "", "write the report into this `file`")
	flags.StringVar(&markdownPath, "markdown", "", "write the report into this `file`, as the section of the part")
	if err := flags.Parse(args); err != nil {
		return err
	}
	do := parts[part]
	if do == nil || flags.NArg() > 0 {
		return fmt.Errorf("-part is %q and the rest %q; the parts are shop, waiting, snapshot and dedup", part, flags.Args())
	}
	if s.minutes == 0 {
		s.minutes = map[string]float64{"shop": 30, "snapshot": 10}[part]
	}
	if s.minutes < 0 || s.clients < 1 || s.messages < 10*leastDrained || s.rows < 10_000 || s.body < 2 || s.secs <= 0 {
		return errors.New("the flags must be positive, -messages at least 100,000, -rows at least 10,000")
	}
	r := &report{
		Part: part, Command: strings.Join(append([]string{"go run ./internal/lab/soak"}, args...), " "), Began: time.Now(),
		Machine: fmt.Sprintf("%d cores, %s/%s", runtime.NumCPU(), runtime.GOOS, runtime.GOARCH),
	}
	if err := do(ctx, s, r); err != nil {
		return fmt.Errorf("%s: %w", part, err)
	}
	r.Took = time.Since(r.Began).Round(time.Second).String()
	return errors.Join(r.text(out), r.save(jsonPath, markdownPath), r.verdict())
}
