package archtest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// modules are the folders of the repository's modules.
var modules = []string{".", "examples/databasesql", "examples/firstservice", "examples/quickstart", "examples/reservation", "internal/lab", "modules/kafka", "modules/nats", "modules/operator", "modules/rpc", "modules/service", "modules/watermill"}

// listed is the output of go list for one package.
type listed struct {
	ImportPath, Dir           string
	Imports, Deps             []string
	TestGoFiles, XTestGoFiles []string
}

// name returns the package's folder within the repository.
func (p listed) name() string { return strings.TrimPrefix(p.ImportPath, module+"/") }

var list = sync.OnceValues(func() ([]listed, error) {
	root, err := filepath.Abs("../..")
	if err != nil {
		return nil, err
	}
	var all []listed
	for _, dir := range modules {
		cmd := exec.Command("go", "list", "-json=ImportPath,Dir,Imports,Deps,TestGoFiles,XTestGoFiles", "./...")
		cmd.Dir = filepath.Join(root, dir)
		cmd.Env = append(os.Environ(), "GOWORK="+filepath.Join(root, "go.work"))
		var complaint bytes.Buffer
		cmd.Stderr = &complaint
		out, err := cmd.Output()
		if err != nil {
			return nil, fmt.Errorf("go list in %s: %w\n%s", dir, err, complaint.String())
		}
		for decoder := json.NewDecoder(bytes.NewReader(out)); ; {
			var p listed
			if err := decoder.Decode(&p); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				return nil, err
			}
			all = append(all, p)
		}
	}
	return all, nil
})

func packages(t *testing.T) []listed {
	t.Helper()
	all, err := list()
	if err != nil {
		t.Fatal(err)
	}
	if len(all) == 0 {
		t.Fatal("no packages found")
	}
	return all
}

func TestImports(t *testing.T) {
	t.Parallel()
	for _, p := range packages(t) {
		f, ok := floorOf(p.name())
		if !ok {
			t.Errorf("%s is not in the table of floors_test.go", p.name())
			continue
		}
		for _, broken := range violations(p, f) {
			t.Errorf("%s %s", p.name(), broken)
		}
	}
}

// violations describes how a package breaks its rule.
func violations(p listed, f floor) []string {
	var broken []string
	for _, path := range p.Imports {
		own := isOwn(path)
		switch {
		case f.stdOnly && (own || isThirdParty(path)):
			broken = append(broken, "imports "+path+", but may import the standard library only")
		case f.publicOnly && strings.HasPrefix(path, module+"/internal/"):
			broken = append(broken, "imports the internal package "+path)
		case isThirdParty(path) && !f.anyModule && !granted(path, light) && !granted(path, f.clients):
			broken = append(broken, "imports "+path+", which its rule does not grant")
		}
	}
	for _, path := range p.Deps {
		if isOwn(path) && !mayStandOn(f, strings.TrimPrefix(path, module+"/")) {
			broken = append(broken, "depends on "+path+", which its rule does not grant")
		}
		if client := heavyOf(path); client != "" && !slices.Contains(f.clients, client) {
			broken = append(broken, "compiles "+path)
		}
		if f.noTesting && path == "testing" {
			broken = append(broken, "links package testing")
		}
	}
	return broken
}

func mayStandOn(f floor, pkg string) bool {
	return slices.ContainsFunc(f.on, func(pattern string) bool { return covers(pattern, pkg) })
}

func isOwn(path string) bool { return path == module || strings.HasPrefix(path, module+"/") }

func isThirdParty(path string) bool {
	first, _, _ := strings.Cut(path, "/")
	return strings.Contains(first, ".") && !isOwn(path)
}

func granted(path string, modules []string) bool {
	return slices.ContainsFunc(modules, func(m string) bool { return path == m || strings.HasPrefix(path, m+"/") }) &&
		(heavyOf(path) == "" || slices.Contains(modules, heavyOf(path)))
}

// heavyOf returns the heavy module that a path belongs to, or "".
func heavyOf(path string) string {
	for _, m := range heavy {
		if path == m || strings.HasPrefix(path, m+"/") {
			return m
		}
	}
	return ""
}

// TestRules checks that each rule can fail.
func TestRules(t *testing.T) {
	t.Parallel()
	own := func(pkg string) string { return module + "/" + pkg }
	for _, tc := range []struct {
		name, pkg string
		imports   []string
		deps      []string
		want      string // part of the violation; empty: none
	}{
		{name: "core with OpenTelemetry and uuid", pkg: "outbox", imports: []string{"context", openTelemetry + "/trace", uuid, own("internal/ids")}},
		{name: "core with a client", pkg: "outbox", imports: []string{pgx}, want: "imports " + pgx},
		{name: "core with a client below it", pkg: "inbox", deps: []string{amqp}, want: "compiles " + amqp},
		{name: "core with the SDK", pkg: "inbox", imports: []string{telemetrySDK + "/trace"}, want: "imports"},
		{name: "core with another core", pkg: "outbox", deps: []string{own("inbox")}, want: "depends on"},
		{name: "core with txretry", pkg: "idempotency", deps: []string{own("txretry")}, want: "depends on"},
		{name: "core with its driver", pkg: "outbox", deps: []string{own("outbox/driver")}},
		{name: "core with the driver of another", pkg: "inbox", deps: []string{own("outbox/driver")}, want: "depends on"},
		{name: "driver with its core", pkg: "outbox/driver", deps: []string{own("outbox")}, want: "depends on"},
		{name: "driver above its core", pkg: "inbox/driver", deps: []string{own("inbox")}},
		{name: "driver with a client", pkg: "ratelimit/driver", deps: []string{redis}, want: "compiles " + redis},
		{name: "driver of transactions", pkg: "txretry/driver", imports: []string{pgx}, deps: []string{pgx}},
		{name: "driver of transactions with its core", pkg: "txretry/driver", deps: []string{own("txretry")}, want: "depends on"},
		{name: "core with a test tool", pkg: "outbox", deps: []string{own("internal/testenv/pgtest")}, want: "depends on"},
		{name: "core with an unknown module", pkg: "ratelimit", imports: []string{"example.com/x"}, want: "imports example.com/x"},
		{name: "expiry with the cron parser", pkg: "expiry", imports: []string{cron}, deps: []string{cron}},
		{name: "Postgres adapter", pkg: "outbox/outboxpgx", imports: []string{pgx + "/pgxpool"}, deps: []string{own("txretry"), own("outbox"), pgx}},
		{name: "Postgres adapter with Redis", pkg: "inbox/inboxpgx", deps: []string{redis}, want: "compiles " + redis},
		{name: "Redis adapter with txretry", pkg: "outbox/outboxredis", deps: []string{own("txretry")}, want: "depends on"},
		{name: "AMQP adapter of another core", pkg: "inbox/inboxamqp", deps: []string{own("outbox")}, want: "depends on"},
		{name: "fake with testing", pkg: "outbox/outboxtest", deps: []string{"testing"}, want: "testing"},
		{name: "conformance with testing", pkg: "outbox/outboxtest/conformance", deps: []string{"testing"}},
		{name: "fake with its Postgres adapter", pkg: "idempotency/idempotencytest", deps: []string{own("idempotency/idempotencypgx"), pgx}},
		{name: "fake without a Postgres adapter with pgx", pkg: "ratelimit/ratelimittest", deps: []string{pgx}, want: "compiles " + pgx},
		{name: "operator's page with the commands' library", pkg: "modules/operator/page", deps: []string{cobra}, want: "compiles " + cobra},
		{name: "operator's page with the agents", pkg: "modules/operator/page", deps: []string{mcp}, want: "compiles " + mcp},
		{name: "operator's agents with a progress bar", pkg: "modules/operator/agents", deps: []string{mcp, bar}, want: "compiles " + bar},
		{name: "example with an internal package", pkg: "examples/reservation", imports: []string{own("internal/ids")}, want: "internal package"},
		{name: "booking with uuid", pkg: "examples/reservation/internal/booking", imports: []string{uuid}, want: "standard library only"},
		{name: "booking with a public package", pkg: "examples/reservation/internal/booking", imports: []string{own("outbox")}, want: "standard library only"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			f, ok := floorOf(tc.pkg)
			if !ok {
				t.Fatalf("%s is not in the table", tc.pkg)
			}
			got := strings.Join(violations(listed{ImportPath: own(tc.pkg), Imports: tc.imports, Deps: tc.deps}, f), "; ")
			if tc.want == "" && got != "" || !strings.Contains(got, tc.want) {
				t.Errorf("violations %q, want %q", got, tc.want)
			}
		})
	}
	if _, ok := floorOf("unheard"); ok {
		t.Error("a package that is not in the table has a rule")
	}
}

// TestLeakChecks: every package with tests runs them through testenv.Run, which detects goroutines
// that they leave.
func TestLeakChecks(t *testing.T) {
	t.Parallel()
	for _, p := range packages(t) {
		files := slices.Concat(p.TestGoFiles, p.XTestGoFiles)
		if len(files) == 0 {
			continue
		}
		found := false
		for _, file := range files {
			parsed, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, file), nil, parser.SkipObjectResolution)
			if err != nil {
				t.Error(err)
				continue
			}
			found = found || runsTestenv(parsed)
		}
		if !found {
			t.Errorf("%s has tests, but no TestMain that calls testenv.Run", p.name())
		}
	}
}

func runsTestenv(file *ast.File) bool {
	for _, decl := range file.Decls {
		fn, ok := decl.(*ast.FuncDecl)
		if !ok || fn.Name.Name != "TestMain" || fn.Recv != nil {
			continue
		}
		calls := false
		ast.Inspect(fn, func(n ast.Node) bool {
			if sel, ok := n.(*ast.SelectorExpr); ok && sel.Sel.Name == "Run" {
				if pkg, ok := sel.X.(*ast.Ident); ok && pkg.Name == "testenv" {
					calls = true
				}
			}
			return true
		})
		return calls
	}
	return false
}
