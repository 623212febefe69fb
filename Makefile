# Short names for commands; `make help` lists them. `make nightly` runs the nightly parts, which also run alone.

GO        ?= go
FUZZTIME  ?= 10s
SEQUENCES ?= 2000
SCHEDULES ?= 20000
SEED      ?= 0
MINUTES   ?= 10
OUT       ?= chaos-report
GOLANGCI := github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
VULN     := golang.org/x/vuln/cmd/govulncheck@v1.9.0
WORK     := . examples/databasesql examples/firstservice examples/quickstart examples/reservation internal/lab modules/kafka modules/nats modules/operator modules/rpc modules/service modules/watermill
APART    := internal/lab/bench internal/lab/nightly
MODULES  := $(WORK) $(APART)
NESTED   := modules/kafka modules/nats modules/operator modules/rpc modules/service modules/watermill
SERVERS  := $(GO) run ./internal/lab/servers --

.DEFAULT_GOAL := help
.PHONY: help test quick check nightly faults race differential fuzz sim pairs planted models browser chaos clusters soak matrix bench interop cover lint subjects vuln vet tidy example release

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

quick: ## tier 1: the tests that need no server, a minute
	@$(GO) run ./internal/lab/test -tier=1

test: ## tier 2: all tests that a change must pass, on real servers that it starts; four to six minutes
	@$(GO) run ./internal/lab/test

nightly: ## tier 3: all parts below up to matrix, one after the other; about 90 minutes, as root on Debian. The report is internal/lab/nightly.md
	@$(GO) run ./internal/lab/test -nightly

faults: ## every test, with outages, stalls, kills and the promised times
	@$(GO) run ./internal/lab/test -tier=3

race: ## tier 2 with the race detector
	@$(GO) run ./internal/lab/test -race

differential: ## the tests that compare fakes with servers, SEQUENCES (2000) random sequences of calls each
	HOLDFAST_FUZZ_SEQUENCES=$(SEQUENCES) $(SERVERS) $(GO) test -count=1 -run='^TestDifferential' -timeout=60m \
		$$(grep -rl --include='*_test.go' '^func TestDifferential' . | xargs -n1 dirname | sort -u)

fuzz: ## every fuzz test for FUZZTIME (10s)
	@grep -rn --include='*_test.go' -o '^func Fuzz[A-Za-z0-9_]*' . | sed 's|/[^/]*_test.go:[0-9]*:func | |' | sort -u | \
	while read -r dir name; do \
		echo "$$dir $$name"; \
		$(GO) test "$$dir" -run='^$$' -fuzz="^$$name\$$" -fuzztime=$(FUZZTIME) || exit 1; \
	done

sim: ## the whole shop on the fakes under SCHEDULES (20000) seeded schedules of faults; SEED=n replays one and shrinks it
	$(GO) test -v -count=1 -timeout=120m ./internal/lab/sim $(if $(filter-out 0,$(SEED)),-run='^TestSeed$$' -seed=$(SEED),-run='^TestSchedules$$' -seeds=$(SCHEDULES) -report=report.md)

pairs: ## a small shop on the fakes under each fault and each pair of faults, at every point; about two minutes
	$(GO) test -v -count=1 -timeout=60m ./internal/lab/sim -run='^TestEnumerated$$' -pairs -report=pairs.md

planted: ## plant known bugs one by one: the simulation or a suite must find each; about half an hour
	$(SERVERS) $(GO) run ./internal/lab/planted -report=internal/lab/planted/report.md

models: ## models of the protocols, every interleaving, and planted bugs that the search must find; a minute and a half, needs spin and cc
	$(GO) run ./internal/lab/models -report=internal/lab/models/report.md

browser: ## the pages in Chromium with a hundred thousand dead letters, and the schema files in migration tools; RECORD=1 renews the pictures of the documents
	HOLDFAST_NIGHTLY=1 $(SERVERS) sh -c 'cd internal/lab/nightly && GOWORK=off $(GO) test -count=1 -timeout=60m ./...'

chaos: ## the shop as processes, under every kind of fault for MINUTES (10), with recovery within 10 s; SEED=7 repeats a run, ONLY=kill,clock chooses faults, BROKER=nats the broker; the report is in OUT
	@$(GO) run ./internal/lab/chaos -calm $(if $(SEEDS),-seeds $(SEEDS)) -seed $(SEED) -minutes $(MINUTES) $(if $(ONLY),-only $(ONLY)) $(if $(BROKER),-broker=$(BROKER)) -out $(OUT)

clusters: ## the shop on clusters of RabbitMQ, Redis and Postgres; nodes are killed and cut off; as root on Debian, six minutes and more
	@$(GO) run ./internal/lab/clusters

soak: ## figures that must stay flat under load, in a quarter of an hour; LONG=1 takes two hours and writes the report; PART=shop, waiting, snapshot or dedup
	$(GO) run ./internal/lab/soak -part=$(or $(PART),all) $(if $(LONG),-markdown=internal/lab/soak/report.md,-minutes=5 -messages=500000 -rows=2000000 -secs=5)

matrix: ## the adapters' suites on every version of the servers that Debian packages; as root on Debian
	@$(GO) run ./internal/lab/matrix

bench: ## every workload beside its peers and the raw clients, five rounds, most of an hour; RUN="outbox" runs one. The report is internal/lab/performance.md
	GOWORK=off $(GO) -C internal/lab/bench run . $(or $(RUN),all -rounds=5 -report=../performance)

interop: ## Symfony Messenger, pika and amqplib against ours, both ways; as root on Debian it installs them. RECORD=1 renews the fixtures
	@$(GO) run ./internal/lab/interop $(if $(RECORD),-record)

cover: ## test coverage of the packages of the root module, in cover.out
	$(SERVERS) $(GO) test -timeout=30m -coverpkg=./... -coverprofile=cover.out ./...
	$(GO) tool cover -func=cover.out | tail -1

check: tidy vet lint vuln ## all checks except tests: go.mod files, vet, linters, known vulnerabilities

vet: ## go vet of everything, and the root module as its users get it
	$(GO) vet -tags=interop work
	@for dir in $(APART); do echo "$$dir"; (cd "$$dir" && GOWORK=off $(GO) vet ./...) || exit 1; done
	GOWORK=off $(GO) vet ./... && GOWORK=off $(GO) build ./...

lint: ## golangci-lint
	@for dir in $(WORK); do echo "$$dir"; (cd "$$dir" && $(GO) run $(GOLANGCI) run ./...) || exit 1; done
	@for dir in $(APART); do echo "$$dir"; (cd "$$dir" && GOWORK=off $(GO) run $(GOLANGCI) run ./...) || exit 1; done

BASE ?= origin/main

subjects: ## the subjects of the commits since BASE (origin/main): "package: verb ...", 72 characters at most
	@git log --no-merges --format='%h %s' $(BASE)..HEAD | awk '{ subject = substr($$0, index($$0, " ") + 1) } \
		length(subject) > 72 || subject !~ /^[A-Za-z0-9][^:]*: [a-z]/ || subject ~ /\.$$/ { print "bad subject: " $$0; bad = 1 } END { exit bad }'

vuln: ## known vulnerabilities in the code that we call
	@for dir in $(WORK); do (cd "$$dir" && $(GO) run $(VULN) ./...) || exit 1; done
	@for dir in $(APART); do (cd "$$dir" && GOWORK=off $(GO) run $(VULN) ./...) || exit 1; done

tidy: ## fail if a go.mod or go.sum is not tidy
	@for dir in $(MODULES); do (cd "$$dir" && GOWORK=off $(GO) mod tidy -diff) || exit 1; done

example: ## the ticket shop on the in-memory back end
	$(GO) run ./examples/reservation

release: ## require VERSION of the root in the NESTED modules instead of its folder, before they are tagged: see CONTRIBUTING.md
	@test -n "$(VERSION)" || { echo "make release VERSION=v1.2.3"; exit 1; }
	@for dir in $(NESTED); do (cd "$$dir" && GOWORK=off $(GO) mod edit -require=github.com/holdfast-go/holdfast@$(VERSION) -dropreplace=github.com/holdfast-go/holdfast) || exit 1; done
