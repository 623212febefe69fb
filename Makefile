# Short names for what needs nothing but Go; `make help` lists them.

GO       ?= go
FUZZTIME ?= 10s
ROUNDS   ?= 200
SEQUENCES ?= 40000
SCHEDULES ?= 20000
SEED      ?= 0
OUT      ?= chaos-report
GOLANGCI := github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
VULN     := golang.org/x/vuln/cmd/govulncheck@v1.9.0
MODULES  := . examples/databasesql examples/operator examples/quickstart examples/reservation internal/lab rpc watermillbridge
NESTED   := rpc watermillbridge

.DEFAULT_GOAL := help
.PHONY: help test sim planted faults chaos clusters matrix soak bench differential interop cover fuzz lint vuln tidy example release

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

test: ## all checks and all tests, on real servers it gets by itself
	@$(GO) run ./internal/lab/test

sim: ## the whole shop on the fakes under SCHEDULES (20000) seeded schedules of faults; SEED=n plays one and shrinks it
	$(GO) test -v -count=1 -timeout=120m ./internal/lab/sim $(if $(filter-out 0,$(SEED)),-run='^TestSeed$$' -seed=$(SEED),-run='^TestSchedules$$' -seeds=$(SCHEDULES) -report=report.md)

planted: ## known bugs, one after the other, each of which the simulation or a suite must find; about half an hour
	$(GO) run ./internal/lab/servers -- $(GO) run ./internal/lab/planted -report=internal/lab/planted/report.md

faults: ## the fault tests in their long form, ROUNDS (200) kills and as much of the other faults; most of an hour
	HOLDFAST_CHAOS_ROUNDS=$(ROUNDS) $(GO) run ./internal/lab/servers -- $(GO) test -v -count=1 -parallel=1 -timeout=60m ./internal/lab/faults ./expiry/expirypgx

chaos: ## the shop as processes, and every kind of fault: an hour, or SEEDS=3, or SEED=7 again, ONLY=kill,clock; the report is in OUT
	@$(GO) run ./internal/lab/chaos $(if $(SEEDS),-seeds $(SEEDS)) -seed $(SEED) $(if $(MINUTES),-minutes $(MINUTES)) $(if $(ONLY),-only $(ONLY)) -out $(OUT)

soak: ## what stays flat: the shop for half an hour, then millions of rows; over 90 minutes, 30 GB of disk. PART=shop, waiting, snapshot or dedup; MINUTES=n shortens
	$(GO) run ./internal/lab/soak -part=$(or $(PART),all) $(if $(MINUTES),-minutes=$(MINUTES)) -markdown=internal/lab/soak/report.md

bench: ## every workload beside its peers and the raw clients, five rounds; most of an hour. The report is internal/lab/performance.md
	$(GO) run ./internal/lab/bench all -rounds=5 -report=internal/lab/performance

differential: ## the tests that compare fakes with servers in their long form, SEQUENCES (40000) random ones each
	HOLDFAST_FUZZ_SEQUENCES=$(SEQUENCES) $(GO) run ./internal/lab/servers -- $(GO) test -v -count=1 -run='^TestDifferential' -timeout=60m \
		$$(grep -rl --include='*_test.go' '^func TestDifferential' . | xargs -n1 dirname | sort -u)

clusters: ## the shop on clusters of RabbitMQ, Redis and Postgres, whose nodes are killed and cut off; as root on Debian, six minutes and more on a slow machine
	@$(GO) run ./internal/lab/clusters

matrix: ## the adapters' suites on every version of the servers that Debian packages; as root on Debian, most of an hour
	@$(GO) run ./internal/lab/matrix

interop: ## Symfony Messenger, pika and amqplib against ours, both ways; as root on Debian it installs them. RECORD=1 renews the fixtures
	@$(GO) run ./internal/lab/interop $(if $(RECORD),-record)

cover: ## test coverage of the packages of the root module, in cover.out
	$(GO) run ./internal/lab/servers -- $(GO) test -timeout=30m -coverpkg=./... -coverprofile=cover.out ./...
	$(GO) tool cover -func=cover.out | tail -1

fuzz: ## every fuzz test for FUZZTIME (10s)
	@grep -rn --include='*_test.go' -o '^func Fuzz[A-Za-z0-9_]*' . | sed 's|/[^/]*_test.go:[0-9]*:func | |' | sort -u | \
	while read -r dir name; do \
		echo "$$dir $$name"; \
		$(GO) test "$$dir" -run='^$$' -fuzz="^$$name\$$" -fuzztime=$(FUZZTIME) || exit 1; \
	done

lint: ## golangci-lint, as CI runs it
	@for dir in $(MODULES); do echo "$$dir"; (cd "$$dir" && $(GO) run $(GOLANGCI) run ./...) || exit 1; done

vuln: ## known vulnerabilities in what we call
	@for dir in $(MODULES); do (cd "$$dir" && $(GO) run $(VULN) ./...) || exit 1; done

tidy: ## fail if a go.mod or go.sum is not tidy
	@for dir in $(MODULES); do (cd "$$dir" && GOWORK=off $(GO) mod tidy -diff) || exit 1; done

example: ## the ticket shop on the in-memory back end
	$(GO) run ./examples/reservation

release: ## have the NESTED modules require VERSION of the root, before they are tagged: see CONTRIBUTING.md
	@test -n "$(VERSION)" || { echo "make release VERSION=v1.2.3"; exit 1; }
	@for dir in $(NESTED); do (cd "$$dir" && GOWORK=off $(GO) mod edit -require=github.com/holdfast-go/holdfast@$(VERSION)) || exit 1; done
