// Command holdfast operates a service that is built on Holdfast: see package operator. A file lists the parts of the
// service. DATABASE_URL, AMQP_URL and REDIS_URL have the addresses of its servers.
package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/signal"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/command"
)

const (
	program   = "holdfast"
	exitUsage = 2
)

func main() {
	// The first signal starts the shutdown. A second one ends the process at once.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	os.Exit(run(ctx, os.Args[1:], os.Getenv, os.Stdout, os.Stderr))
}

// run is the program; it returns the exit code.
func run(ctx context.Context, args []string, getenv func(string) string, stdout, stderr io.Writer) int {
	fail := func(err error) int {
		fmt.Fprintf(stderr, "%s: %s\n", program, strings.ReplaceAll(err.Error(), "\n", "; "))
		return exitUsage
	}
	slog.SetDefault(slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))) // the commands print the rest
	help := asksForHelp(args)
	service, closeAll, err := load(args, getenv)
	if err != nil && !help {
		return fail(err)
	}
	defer closeAll()
	root, err := command.New(service)
	if err != nil {
		return fail(err)
	}
	root.PersistentFlags().String("config", "", "the `file` that lists the service's parts (default: HOLDFAST_CONFIG, or "+defaultConfig+")")
	if err := root.MarkPersistentFlagFilename("config", "yaml", "yml"); err != nil {
		return fail(err)
	}
	return command.Execute(ctx, root, args, stdout, stderr)
}

// load reads the file that the arguments name, and opens its parts.
func load(args []string, getenv func(string) string) (operator.Config, func(), error) {
	nothing, noClose := operator.Config{Program: program}, func() {}
	path, err := configPath(args, getenv)
	if err != nil {
		return nothing, noClose, err
	}
	f, err := readFile(path)
	if err != nil {
		return nothing, noClose, err
	}
	service, closeAll, err := open(f, getenv)
	if err != nil {
		return nothing, noClose, err
	}
	return service, closeAll, nil
}

// asksForHelp reports whether the arguments ask for help or completion, which need no service.
func asksForHelp(args []string) bool {
	if len(args) == 0 || slices.Contains(args, "--help") || slices.Contains(args, "-h") {
		return true
	}
	return slices.Contains([]string{"help", "completion", "__complete", "__completeNoDesc"}, args[0])
}

// defaultConfig is the file if none is named.
const defaultConfig = "holdfast.yaml"

// configPath returns the value of --config. It runs before the commands exist, because they depend on the file. An empty
// value is an error: it comes from a variable that is not set.
func configPath(args []string, getenv func(string) string) (string, error) {
	flags := pflag.NewFlagSet(program, pflag.ContinueOnError)
	flags.ParseErrorsAllowlist.UnknownFlags = true
	flags.Usage = func() {}
	flags.SetOutput(io.Discard)
	path := flags.String("config", "", "")
	if err := flags.Parse(args); err != nil && strings.Contains(err.Error(), "config") {
		return "", err // the commands report errors of other flags
	}
	if flags.Changed("config") && *path == "" {
		return "", errors.New("--config has no value")
	}
	return cmp.Or(*path, getenv("HOLDFAST_CONFIG"), defaultConfig), nil
}

// maxFile bounds the file, in bytes, so that a file named by mistake is not read whole.
const maxFile = 1 << 20

// file lists the parts of a service. Every field except a retention has the default of its package.
type file struct {
	Outboxes    []outboxEntry      `yaml:"outboxes"`
	Consumers   []consumerEntry    `yaml:"consumers"`
	Idempotency []idempotencyEntry `yaml:"idempotency"`
	Limits      []limitEntry       `yaml:"limits"`
	Sweeps      []sweepEntry       `yaml:"sweeps"`
	// TraceURL is the address of a trace, with {trace_id} in place of its id.
	TraceURL string `yaml:"trace_url"`
}

type outboxEntry struct {
	Name   string `yaml:"name"`
	Schema string `yaml:"schema"`
	Table  string `yaml:"table"`
	// Exchange is for RabbitMQ, Stream for Redis. Set at most one. Without both there is no relay.
	Exchange string `yaml:"exchange"`
	Stream   string `yaml:"stream"`
	// Retention is the service's own. It has no default, because relay and prune delete by it.
	Retention *time.Duration `yaml:"retention"`
	// DedupRetention is how long the service remembers keys of messages.
	DedupRetention time.Duration `yaml:"dedup_retention"`
}

type consumerEntry struct {
	Name string `yaml:"name"`
	// Queue is for RabbitMQ, Stream for Redis. Set one of them.
	Queue      string   `yaml:"queue"`
	Stream     string   `yaml:"stream"`
	Group      string   `yaml:"group"`
	Classic    bool     `yaml:"classic"`
	Partitions int      `yaml:"partitions"`
	Ordered    bool     `yaml:"ordered"`
	ParkKeys   bool     `yaml:"park_keys"`
	Classes    []string `yaml:"classes"`
	// DeadLetterPrefix is the prefix in the consumer's own settings.
	DeadLetterPrefix string         `yaml:"dead_letter_prefix"`
	Bindings         []bindingEntry `yaml:"bindings"`
	// Consumer is the name in the table of processed messages. Default: Name.
	Consumer string `yaml:"consumer"`
	Schema   string `yaml:"schema"`
	Table    string `yaml:"table"`
	// Retention is the service's own, of the table. It has no default, because prune and retry depend on it.
	Retention *time.Duration `yaml:"retention"`
}

type bindingEntry struct {
	Exchange string `yaml:"exchange"`
	Key      string `yaml:"key"`
}

type idempotencyEntry struct {
	Name   string `yaml:"name"`
	Schema string `yaml:"schema"`
	Table  string `yaml:"table"`
	// Prefix is the prefix of the keys on Redis, if the store is there and not in a table.
	Prefix  string `yaml:"prefix"`
	HashTag bool   `yaml:"hash_tag"`
}

type limitEntry struct {
	Name      string        `yaml:"name"`
	Max       int64         `yaml:"max"`
	Window    time.Duration `yaml:"window"`
	Algorithm string        `yaml:"algorithm"` // sliding, bucket or fixed
	Burst     int64         `yaml:"burst"`
	// Keys are the callers that the status shows; "" stands for a limit that all callers share.
	Keys []string `yaml:"keys"`
	// Prefix and Tag are the limiter's settings.
	Prefix string `yaml:"prefix"`
	Tag    string `yaml:"tag"`
}

type sweepEntry struct {
	Name     string `yaml:"name"`
	Schema   string `yaml:"schema"`
	Table    string `yaml:"table"`
	ID       string `yaml:"id"`
	Deadline string `yaml:"deadline"`
	Status   string `yaml:"status"`
	Active   string `yaml:"active"`
	Expired  string `yaml:"expired"`
	Where    string `yaml:"where"`
}

// readFile reads the file at path.
func readFile(path string) (file, error) {
	var f file
	opened, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return f, fmt.Errorf("there is no %s: set --config", path)
	}
	if err != nil {
		return f, err
	}
	defer func() { _ = opened.Close() }() // it was only read
	text, err := io.ReadAll(io.LimitReader(opened, maxFile+1))
	if err != nil {
		return f, err
	}
	if len(text) > maxFile {
		return f, fmt.Errorf("%s: more than %d bytes", path, maxFile)
	}
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	decoder.KnownFields(true)
	if err := decoder.Decode(&f); err != nil && !errors.Is(err, io.EOF) {
		return f, fmt.Errorf("%s: %s", path, inWords(err))
	}
	return f, nil
}

// The errors of yaml name types of Go, which the author of a file does not know.
var (
	unknownField = regexp.MustCompile(`field (\S+) not found in type \S+`)
	wrongValue   = regexp.MustCompile("cannot unmarshal !!(\\w+)( `[^`]*`)? into (\\S+)")
	kinds        = map[string]string{"str": "the text", "int": "the number", "float": "the number", "bool": "the truth value", "seq": "a list", "map": "fields", "timestamp": "the time"}
	wanted       = map[string]string{
		"string": "a text", "bool": "true or false", "int": "a whole number", "int64": "a whole number", "float64": "a number",
		"time.Duration": `a duration such as "720h"`, "[]string": "a list of texts",
	}
)

// inWords returns the text of an error of yaml without types of Go.
func inWords(err error) string {
	text := unknownField.ReplaceAllString(err.Error(), "there is no field $1")
	return wrongValue.ReplaceAllStringFunc(text, func(s string) string {
		part := wrongValue.FindStringSubmatch(s)
		want, known := wanted[strings.TrimPrefix(part[3], "*")]
		switch {
		case !known && strings.HasPrefix(part[3], "[]"):
			want = "a list of entries"
		case !known:
			want = "fields"
		}
		return "got " + cmp.Or(kinds[part[1]], part[1]) + part[2] + ", want " + want
	})
}
