package main

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/expirytest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// The back ends.
const (
	backendMemory     = "memory"
	backendServices   = "services"
	backendContainers = "containers"
)

// The roles of a process.
const (
	roleAll      = "all"
	roleAPI      = "api"
	roleRelay    = "relay"
	roleConsumer = "consumer"
	roleSweeper  = "sweeper"
)

// maxLimit is the largest rate limit. Larger ones are not useful, and could not be counted exactly.
const maxLimit = 1_000_000_000

// config has all settings from flags and the environment.
type config struct {
	backend, broker string
	// addr is the address to listen on; "": none.
	addr string
	// opsAddr is the address for operators; "": addr.
	opsAddr     string
	role        string
	hold        time.Duration
	sweep       string // schedule of the sweeper, beside due rows
	userLimit   int
	globalLimit int
	page        bool // whether the shop has a page, which this process serves or reports to
	trials      bool // whether the page may cause faults, which this process then obeys

	// drain is the time between the first failing readiness probe and the end of the listeners.
	drain time.Duration
	// limits end the process by itself.
	limits limits

	databaseURL, redisURL, amqpURL, natsURL string
	// operatorPassword opens the operator's page. "": only the memory back end has the page, for everybody.
	operatorPassword string

	// traces reports whether spans are exported.
	traces bool

	// command is the subcommand and its arguments; nil runs the shop.
	command []string
}

// parseConfig parses the arguments; getenv is os.Getenv. flag.ErrHelp means that
// help was requested, which is written to usage.
func parseConfig(args []string, getenv func(string) string, usage io.Writer) (config, error) {
	var c config
	flags := newFlagSet("reservation")
	flags.StringVar(&c.backend, "backend", "", "memory, services or containers (default memory; services for a subcommand)")
	flags.StringVar(&c.broker, "broker", brokerRabbitMQ, "broker of messages: rabbitmq, redis for Redis Streams, or nats for NATS JetStream")
	flags.StringVar(&c.addr, "addr", "127.0.0.1:8080", "`address` to listen on; roles other than all and api listen only if it is set")
	flags.StringVar(&c.opsAddr, "ops-addr", "", "`address` of /healthz, /readyz and /metrics, which -addr then does not serve (default -addr)")
	flags.StringVar(&c.role, "role", roleAll, "all, api, relay, consumer or sweeper")
	flags.DurationVar(&c.hold, "hold", 15*time.Minute, "how long a reservation is held")
	flags.StringVar(&c.sweep, "sweep", "*/30 * * * *", "`schedule` of the sweeper: cron in UTC, or @every 1s")
	flags.IntVar(&c.userLimit, "user-limit", 10, "POSTs per user and minute")
	flags.IntVar(&c.globalLimit, "global-limit", 1000, "POSTs per minute, 0 for no limit")
	flags.DurationVar(&c.drain, "drain", 0, "how long /readyz answers 503 before the listeners close, so that load balancers notice")
	flags.DurationVar(&c.limits.time, "time-limit", 0, "end after this time, so that a supervisor restarts the process (0: never)")
	flags.Int64Var(&c.limits.messages, "message-limit", 0, "end after this many published or processed messages, or a few more (0: never)")
	flags.Var(&c.limits.memory, "memory-limit", "end when the process uses more `bytes`, such as 256M (0: never)")
	flags.BoolVar(&c.page, "page", false, "serve the shop's page to browsers at /; other roles report to it (default true with -backend=memory)")
	flags.BoolVar(&c.trials, "trials", false, "buttons on the page that make load, bad messages and a slow consumer; consumers need the flag, too (default true with the page of -backend=memory)")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			fmt.Fprintln(usage, "Usage: reservation [flags] [command]\n\nWithout a command the shop runs. Flags:")
			flags.SetOutput(usage)
			flags.PrintDefaults()
			fmt.Fprintln(usage, "\nOperator commands use the servers of DATABASE_URL, REDIS_URL and AMQP_URL or NATS_URL: see reservation help")
		}
		return config{}, err
	}
	c.command = flags.Args()
	if c.backend == "" {
		c.backend = backendMemory
		if len(c.command) > 0 {
			c.backend = backendServices
		}
	}
	if !isSet(flags, "page") {
		c.page = c.backend == backendMemory || c.trials
	}
	if !isSet(flags, "trials") {
		c.trials = c.backend == backendMemory && c.page
	}
	if !c.hasAPI() && !isSet(flags, "addr") {
		c.addr = ""
	}
	c.databaseURL, c.redisURL = getenv("DATABASE_URL"), getenv("REDIS_URL")
	c.amqpURL, c.natsURL = getenv("AMQP_URL"), getenv("NATS_URL")
	if c.offline() {
		c.databaseURL, c.redisURL = cmp.Or(c.databaseURL, "postgres://unset.invalid/"), cmp.Or(c.redisURL, "redis://unset.invalid")
		c.amqpURL, c.natsURL = cmp.Or(c.amqpURL, "amqp://unset.invalid"), cmp.Or(c.natsURL, "nats://unset.invalid")
	}
	c.operatorPassword = getenv("OPERATOR_PASSWORD")
	traces, err := tracesWanted(getenv)
	c.traces = traces
	return c, errors.Join(err, c.validate())
}

func (c config) validate() error {
	var errs []error
	report := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if !slices.Contains([]string{backendMemory, backendServices, backendContainers}, c.backend) {
		report("-backend is %q, must be memory, services or containers", c.backend)
	}
	if !slices.Contains([]string{brokerRabbitMQ, brokerRedis, brokerNATS}, c.broker) {
		report("-broker is %q, must be rabbitmq, redis or nats", c.broker)
	}
	if !slices.Contains([]string{roleAll, roleAPI, roleRelay, roleConsumer, roleSweeper}, c.role) {
		report("-role is %q, must be all, api, relay, consumer or sweeper", c.role)
	}
	if c.addr == "" && c.hasAPI() {
		report("-addr: -role=%s has to listen somewhere", c.role)
	}
	if err := checkAddr(c.addr); err != nil {
		report("-addr: %w", err)
	}
	if err := checkAddr(c.opsAddr); err != nil {
		report("-ops-addr: %w", err)
	}
	if c.opsAddr != "" && !c.hasAPI() {
		report("-ops-addr: -role=%s serves only operators, at -addr", c.role)
	}
	if c.trials && !c.page {
		report("-trials needs -page")
	}
	if c.backend == backendMemory && c.role != roleAll {
		report("-backend=memory runs in one process: -role must be all")
	}
	if c.backend == backendContainers && len(c.command) > 0 {
		report("-backend=containers would start empty servers: a command needs -backend=services")
	}
	if c.backend == backendMemory && len(c.command) > 0 {
		report("-backend=memory runs in one process: a command such as %q finds nothing there", c.command[0])
	}
	if err := checkSchedule(c.sweep); err != nil {
		report("-sweep: %w", err)
	}
	if c.hold < time.Second || c.hold > 366*24*time.Hour {
		report("-hold is %v, must be from 1s to 366 days", c.hold)
	}
	if c.userLimit < 1 || c.userLimit > maxLimit {
		report("-user-limit is %d, must be from 1 to %d", c.userLimit, maxLimit)
	}
	if c.globalLimit < 0 || c.globalLimit > maxLimit {
		report("-global-limit is %d, must be from 0 to %d", c.globalLimit, maxLimit)
	}
	if c.drain < 0 {
		report("-drain must not be negative")
	}
	if c.limits.time < 0 || c.limits.messages < 0 {
		report("-time-limit and -message-limit must not be negative")
	}
	if c.limits.messages > 0 && (c.backend == backendMemory || c.role == roleAPI || c.role == roleSweeper) {
		report("-message-limit: -backend=%s -role=%s counts no messages", c.backend, c.role)
	}
	if c.backend == backendServices {
		errs = append(errs,
			checkURL("DATABASE_URL", c.databaseURL, "postgres", "postgresql"),
			checkURL("REDIS_URL", c.redisURL, "redis", "rediss"))
		switch c.broker {
		case brokerRabbitMQ:
			errs = append(errs, checkURLs("AMQP_URL", c.amqpURL, "amqp", "amqps"))
		case brokerNATS:
			errs = append(errs, checkURLs("NATS_URL", c.natsURL, "nats", "tls"))
		}
	}
	return errors.Join(errs...)
}

// offline reports whether the command works without servers. Their addresses then need not be set.
func (c config) offline() bool {
	if len(c.command) == 0 {
		return false
	}
	return slices.Contains([]string{"help", "completion", "schema", "__complete", "__completeNoDesc"}, c.command[0]) ||
		slices.Contains(c.command, "-h") || slices.Contains(c.command, "--help")
}

// runs reports whether the process has this role.
func (c config) runs(role string) bool { return c.role == roleAll || c.role == role }

// hasAPI reports whether the process serves customers.
func (c config) hasAPI() bool { return c.runs(roleAPI) }

// checkAddr checks an address before any server is started or connected.
func checkAddr(addr string) error {
	if addr == "" {
		return nil
	}
	_, port, err := net.SplitHostPort(addr)
	if err == nil {
		_, err = net.LookupPort("tcp", port)
	}
	return err
}

// checkSchedule checks a schedule with a sweeper that has no rows.
func checkSchedule(schedule string) error {
	store, err := expirytest.New(txretrytest.New(txretrytest.Config{}), expirytest.Config{})
	if err == nil {
		_, err = expiry.NewSweeper(store, expiry.SweeperConfig{Schedule: schedule})
	}
	return err
}

// checkURL checks an address. Its error never quotes it, because it may contain a password.
func checkURL(name, address string, schemes ...string) error {
	u, err := url.Parse(address)
	if err != nil || !slices.Contains(schemes, u.Scheme) {
		return fmt.Errorf("%s is not set to an address that begins with %s://", name, schemes[0])
	}
	return nil
}

// checkURLs checks the addresses of the nodes of a cluster, separated by commas.
func checkURLs(name, addresses string, schemes ...string) error {
	for address := range strings.SplitSeq(addresses, ",") {
		if err := checkURL(name, address, schemes...); err != nil {
			return err
		}
	}
	return nil
}

// newFlagSet returns flags whose errors the caller prints.
func newFlagSet(name string) *flag.FlagSet {
	flags := flag.NewFlagSet(name, flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	flags.Usage = func() {}
	return flags
}

func isSet(flags *flag.FlagSet, name string) bool {
	found := false
	flags.Visit(func(f *flag.Flag) { found = found || f.Name == name })
	return found
}

// oneLine puts joined errors on one line.
func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }
