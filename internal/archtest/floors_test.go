package archtest

import (
	"slices"
	"strings"
)

const module = "github.com/holdfast-go/holdfast"

// The third-party modules that a rule can allow, by the prefix of their import paths.
const (
	pgx           = "github.com/jackc/pgx/v5"
	redis         = "github.com/redis/go-redis/v9"
	amqp          = "github.com/rabbitmq/amqp091-go"
	cron          = "github.com/netresearch/go-cron"
	containers    = "github.com/testcontainers/testcontainers-go"
	openTelemetry = "go.opentelemetry.io/otel"
	telemetrySDK  = "go.opentelemetry.io/otel/sdk"
	uuid          = "github.com/google/uuid"
	grpc          = "google.golang.org/grpc"
	connect       = "connectrpc.com/connect"
	protobuf      = "google.golang.org/protobuf"
	nats          = "github.com/nats-io/nats.go"
	franz         = "github.com/twmb/franz-go"
	watermill     = "github.com/ThreeDotsLabs/watermill"
	cobra         = "github.com/spf13/cobra"
	mcp           = "github.com/modelcontextprotocol/go-sdk"
	bar           = "github.com/schollz/progressbar/v3"
	chromedp      = "github.com/chromedp/chromedp"
	statusProto   = "google.golang.org/genproto/googleapis/rpc"
)

// heavy are the modules that no package may compile, directly or indirectly, unless its rule allows it.
var heavy = []string{pgx, redis, amqp, cron, containers, telemetrySDK, grpc, connect, nats, franz, watermill, cobra, mcp, bar, chromedp}

// light are the modules that any package may import.
var light = []string{openTelemetry, uuid}

// operated are the clients of the servers that the operator shows.
var operated = []string{pgx, cron, redis}

// floor lists the allowed dependencies of a package. Test files are not checked.
type floor struct {
	// pkg is the package's folder. A pattern folder/... covers the folder and all below it.
	pkg string
	// clients are the heavy modules that the package may compile, directly or indirectly.
	clients []string
	// on are the packages of this repository that it may compile, directly or indirectly.
	on []string
	// noTesting forbids package testing, for packages that programs link.
	noTesting bool
	// stdOnly allows imports from the standard library only.
	stdOnly bool
	// anyModule allows direct imports of any third-party module.
	anyModule bool
	// publicOnly forbids direct imports of this repository's internal packages.
	publicOnly bool
}

// ground are the packages without a client: internal ones, and the formats that transports share.
var ground = []string{
	"outbox/format",
	"internal/actor", "internal/backoff", "internal/breaker", "internal/check", "internal/deadletter", "internal/ids", "internal/isolate", "internal/lanes", "internal/partition", "internal/problem", "internal/runloop",
	"internal/sqlident", "internal/sqlstate", "internal/strict", "internal/telemetry", "internal/wire",
}

var floors = slices.Concat(
	groundFloor(),
	[]floor{
		{pkg: "internal/migrate", clients: []string{pgx}, on: with(ground, "internal/pgcall")},
		{pkg: "internal/pgcall", clients: []string{pgx}, on: ground, noTesting: true},
		{pkg: "internal/pgcheck", clients: []string{pgx}, on: ground, noTesting: true},
		{pkg: "internal/pgnotify", clients: []string{pgx}, on: with(ground, "internal/pgcall"), noTesting: true},
		{pkg: "internal/pgpause", clients: []string{pgx}, on: with(ground, "internal/pgcall", "internal/migrate"), noTesting: true},
		{pkg: "internal/pgprune", clients: []string{pgx}, on: with(ground, "internal/pgcall"), noTesting: true},
		{pkg: "internal/amqpconn", clients: []string{amqp}, on: ground},
		{pkg: "internal/redisconn", clients: []string{redis}, noTesting: true},

		// The parts of the Prove functions of the fakes.
		{pkg: "internal/pgfault", clients: []string{pgx}, noTesting: true},
		{pkg: "internal/prove", clients: []string{pgx}, on: with(ground, "internal/pgcall", "internal/pgfault", "txretry", "txretry/driver"), noTesting: true},
		{pkg: "internal/prove/provetest", clients: []string{pgx}, on: with(ground, "internal/pgcall", "internal/pgfault", "internal/prove", "txretry", "txretry/driver")},

		// Tools of tests. No package above depends on them, because no rule allows it.
		{pkg: "internal/archtest", stdOnly: true},
		{pkg: "internal/testenv", clients: []string{pgx, redis, amqp}, on: []string{"internal/strict"}},
		{pkg: "internal/testenv/pgtest", clients: []string{pgx, redis, amqp}, on: []string{"internal/testenv", "internal/strict"}},
		{pkg: "internal/testenv/redistest", clients: []string{pgx, redis, amqp}, on: []string{"internal/testenv", "internal/strict"}},
		{pkg: "internal/testenv/amqptest", clients: []string{pgx, redis, amqp}, on: []string{"internal/testenv", "internal/strict"}},
		{pkg: "internal/silent", clients: []string{pgx, redis, amqp}, on: []string{"internal/testenv", "internal/strict"}},
		{pkg: "internal/metrictest"},
		{pkg: "internal/trace", stdOnly: true},
		{pkg: "internal/trace/keys", clients: []string{pgx}, on: []string{"..."}, noTesting: true}, // it records transactors
		{pkg: "internal/trace/lanes", on: with(ground, "internal/trace", "outbox/driver"), noTesting: true},
		{pkg: "internal/trace/parked", clients: []string{pgx, redis, amqp}, on: []string{"..."}}, // it runs consumers
		{pkg: "internal/lab/test", stdOnly: true},                                                // it runs before any module is downloaded
		{pkg: "internal/lab/...", clients: heavy, on: []string{"..."}, anyModule: true},

		// Transactions need Postgres: this core uses pgx and is not split.
		{pkg: "txretry", clients: []string{pgx}, on: with(ground, "internal/pgcall", "txretry/driver"), noTesting: true},
		{pkg: "txretry/driver", clients: []string{pgx}, on: []string{"txretry/driver"}, noTesting: true},
		{pkg: "txretry/txretrysql", clients: []string{pgx}, on: with(ground, "internal/pgcall", "txretry", "txretry/driver"), noTesting: true},
		{pkg: "txretry/txretrytest", clients: []string{pgx}, on: with(ground, "internal/pgcall", "txretry/...", "internal/prove", "internal/pgfault"), noTesting: true},
		{pkg: "internal/txretry/conformance", clients: []string{pgx}, on: with(ground, "internal/pgcall", "txretry/...", "internal/prove", "internal/pgfault")},
		// For users' tests. The servers that it can start need clients for their health checks.
		{pkg: "txretry/pgtest", clients: []string{pgx, redis, amqp}, on: []string{"internal/testenv", "internal/strict", "internal/testenv/pgtest"}},

		// A program that mounts the page compiles neither the commands' libraries nor the agents' libraries.
		{pkg: "modules/operator", clients: []string{pgx, cron}, on: []string{"..."}, anyModule: true, publicOnly: true, noTesting: true},
		{pkg: "modules/operator/internal/core", clients: operated, on: []string{"..."}, anyModule: true, noTesting: true}, // internal/deadletter
		{pkg: "modules/operator/page", clients: operated, on: []string{"..."}, anyModule: true, publicOnly: true, noTesting: true},
		{pkg: "modules/operator/history", clients: operated, on: []string{"..."}, anyModule: true, noTesting: true}, // runloop
		{pkg: "modules/operator/agents", clients: with(operated, mcp), on: []string{"..."}, anyModule: true, publicOnly: true, noTesting: true},
		{pkg: "modules/operator/command", clients: with(operated, mcp, cobra, bar), on: []string{"..."}, anyModule: true, publicOnly: true, noTesting: true},
		{pkg: "modules/operator/cmd/holdfast", clients: heavy, on: []string{"..."}, anyModule: true, publicOnly: true},

		{pkg: "modules/rpc/internal/...", clients: []string{protobuf, statusProto}, on: with(ground, "idempotency/...", "ratelimit/...", "modules/rpc/internal/..."), noTesting: true},
		{pkg: "modules/rpc/internal/suite/...", clients: heavy, on: []string{"..."}, anyModule: true},
		{pkg: "modules/rpc/idempotencymcp", clients: []string{mcp, grpc, protobuf, statusProto}, noTesting: true, on: with(ground, "idempotency", "idempotency/driver", "idempotency/internal/...",
			"modules/rpc/internal/exchange", "modules/rpc/internal/grpcform", "modules/rpc/internal/answer", "modules/rpc/internal/once")},
		{pkg: "modules/rpc/example", clients: heavy, on: []string{"..."}, anyModule: true, publicOnly: true, noTesting: true},
		{pkg: "modules/rpc/internal/shopv1/...", clients: []string{grpc, connect, protobuf}, on: []string{"modules/rpc/internal/shopv1"}},

		{pkg: "modules/service", stdOnly: true, noTesting: true},

		{pkg: "modules/nats/internal/form", clients: []string{nats}, on: ground, noTesting: true},
		{pkg: "modules/nats/internal/natstest", clients: []string{nats, pgx, redis, amqp}, on: []string{"internal/testenv", "internal/strict"}},
		{pkg: "modules/nats/outboxnats", clients: []string{nats}, on: with(ground, "outbox", "outbox/driver", "internal/outbox/stored", "modules/nats/internal/form"), noTesting: true},
		{pkg: "modules/nats/inboxnats", clients: []string{nats}, on: with(ground, "inbox", "inbox/internal/...", "inbox/driver", "inbox/engine", "internal/inbox/group", "internal/inbox/record", "modules/nats/internal/form"), noTesting: true},

		{pkg: "modules/kafka"}, // tests only
		{pkg: "modules/kafka/internal/kafkatest", clients: []string{franz}},
		{pkg: "modules/kafka/outboxkafka", clients: []string{franz}, on: with(ground, "outbox", "outbox/driver", "internal/outbox/stored"), noTesting: true},

		{pkg: "modules/watermill", clients: []string{watermill}, on: with(ground, "inbox", "inbox/internal/...", "outbox", "outbox/driver"), noTesting: true},

		{pkg: "examples/firstservice", clients: heavy, on: []string{"..."}, anyModule: true, publicOnly: true},
		{pkg: "examples/guides"}, // tests only
		{pkg: "examples/databasesql/...", clients: []string{pgx}, on: []string{"..."}, anyModule: true, publicOnly: true},
		{pkg: "examples/quickstart", clients: []string{pgx, amqp, cron}, on: []string{"..."}, anyModule: true, publicOnly: true},
		{pkg: "examples/reservation/internal/booking", stdOnly: true},
		{pkg: "examples/reservation/...", clients: heavy, on: []string{"..."}, anyModule: true, publicOnly: true},
	},
	protocols("grpc", grpc),
	protocols("connect", connect),
	core("idempotency", "pgx", "redis"),
	core("outbox", "pgx", "amqp", "redis"),
	core("inbox", "pgx", "redis", "amqp"),
	core("ratelimit", "redis"),
	core("expiry", "pgx"),
)

// protocols returns the rules of the interceptors for one protocol, in modules/rpc.
func protocols(name, client string) []floor {
	clients := []string{client, protobuf, statusProto}
	shared := []string{"modules/rpc/internal/exchange", "modules/rpc/internal/" + name + "form"}
	once := with(ground, with(shared, "idempotency", "idempotency/driver", "idempotency/internal/...", "modules/rpc/internal/answer", "modules/rpc/internal/once")...)
	limits := with(ground, with(shared, "ratelimit", "ratelimit/internal/...", "modules/rpc/internal/limit")...)
	return []floor{
		{pkg: "modules/rpc/idempotency" + name, clients: clients, on: once, noTesting: true},
		{pkg: "modules/rpc/ratelimit" + name, clients: clients, on: limits, noTesting: true},
		{pkg: "modules/rpc/internal/" + name + "form", clients: clients, on: with(ground, shared...), noTesting: true},
	}
}

func groundFloor() []floor {
	var all []floor
	for _, pkg := range ground {
		all = append(all, floor{pkg: pkg, on: ground, noTesting: true})
	}
	return all
}

// core returns the rules of one core: itself, its driver, its adapters, its fakes and its conformance suite. A
// driver has no clients. It is below its core if the core's constructor takes one of its types, else above.
func core(name string, adapters ...string) []floor {
	driver := name + "/driver"
	own := with(ground, name, name+"/internal/...", driver)
	underDriver := with(ground, name+"/internal/...")
	if name == "inbox" || name == "ratelimit" {
		underDriver = with(underDriver, name)
	}
	var parser []string
	if name == "expiry" {
		parser = []string{cron}
	}
	all := []floor{
		{pkg: name, clients: parser, on: own, noTesting: true},
		{pkg: name + "/internal/...", clients: parser, on: own, noTesting: true},
		{pkg: driver, on: underDriver, noTesting: true},
	}
	if name == "inbox" { // the transports depend on the engine
		all = append(all, floor{pkg: "inbox/engine", on: own, noTesting: true})
		own = with(own, "inbox/engine")
		all = append(all, floor{pkg: "internal/inbox/record", on: own, noTesting: true}, floor{pkg: "internal/inbox/group", on: own, noTesting: true})
		own = with(own, "internal/inbox/record", "internal/inbox/group")
	}
	if name == "outbox" { // the publishers of modules/ stand on it, too
		all = append(all, floor{pkg: "internal/outbox/stored", on: own, noTesting: true})
		own = with(own, "internal/outbox/stored")
	}
	onPostgres := []string{
		"txretry", "txretry/driver", name + "/" + name + "pgx/driver",
		"internal/migrate", "internal/pgcall", "internal/pgcheck", "internal/pgnotify", "internal/pgpause", "internal/pgprune",
	}
	for _, adapter := range adapters {
		pkg := name + "/" + name + adapter
		switch adapter {
		case "pgx":
			all = append(all,
				floor{pkg: pkg, clients: with(parser, pgx), on: with(own, onPostgres...), noTesting: true},
				floor{pkg: pkg + "/driver", clients: with(parser, pgx), on: own, noTesting: true},
			)
		case "redis":
			all = append(all, floor{pkg: pkg, clients: with(parser, redis), on: with(own, "internal/redisconn"), noTesting: true})
		case "amqp":
			all = append(all, floor{pkg: pkg, clients: with(parser, amqp), on: with(own, "internal/amqpconn"), noTesting: true})
		}
	}
	// Fakes join the fake transaction, which uses pgx, and meet the contracts of the Postgres adapter.
	fake := name + "/" + name + "test"
	onFake, fakeClients := with(own, fake), parser
	if slices.Contains(adapters, "pgx") {
		onFake = with(onFake, with(onPostgres, "txretry/txretrytest", name+"/"+name+"pgx", "internal/prove", "internal/pgfault")...)
		fakeClients = with(parser, pgx)
	}
	if name == "inbox" {
		all = append(all, floor{pkg: "inbox/internal/memory", clients: fakeClients, on: onFake, noTesting: true})
		onFake = with(onFake, "outbox/driver") // its broker is a Publisher of a relay
	}
	suite := fake + "/conformance"
	if name == "ratelimit" || name == "expiry" { // users cannot write their own store yet
		suite = "internal/" + name + "/conformance"
	}
	all = append(all, floor{pkg: fake, clients: fakeClients, on: onFake, noTesting: true})
	if name == "outbox" { // its suite compares the calls of a store with a model
		onFake = with(onFake, "internal/trace", "internal/trace/lanes")
	}
	if name == "idempotency" {
		onFake = with(onFake, "internal/trace", "internal/trace/keys")
	}
	return append(all, floor{pkg: suite, clients: fakeClients, on: onFake})
}

func with(list []string, more ...string) []string { return slices.Concat(list, more) }

// floorOf returns the most specific rule for a package.
func floorOf(pkg string) (floor, bool) {
	var best floor
	found := false
	for _, f := range floors {
		if covers(f.pkg, pkg) && (!found || len(f.pkg) > len(best.pkg)) {
			best, found = f, true
		}
	}
	return best, found
}

// covers reports whether pattern, a folder or folder/..., matches pkg.
func covers(pattern, pkg string) bool {
	if pattern == "..." || pattern == pkg {
		return true
	}
	folder, all := strings.CutSuffix(pattern, "/...")
	return all && (pkg == folder || strings.HasPrefix(pkg, folder+"/"))
}
