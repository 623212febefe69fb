package archtest_test

import (
	"context"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
)

var goBlock = regexp.MustCompile("(?s)```go\n(.*?)```")

// TestDocs: the Go code of every document also stands in a Go file of the repository, which the build
// compiles.
func TestDocs(t *testing.T) {
	t.Parallel()
	var code []string
	for _, file := range files(t, ".go") {
		code = append(code, normal(read(t, file)))
	}
	blocks := 0
	for _, file := range files(t, ".md") {
		for _, block := range goBlock.FindAllStringSubmatch(read(t, file), -1) {
			blocks++
			if !slices.ContainsFunc(code, func(c string) bool { return strings.Contains(c, normal(block[1])) }) {
				t.Errorf("this code of %s is in no Go file:\n%s", file, block[1])
			}
		}
	}
	if blocks == 0 {
		t.Error("the documents have no Go code")
	}
}

// files returns the repository's files with this ending.
func files(t *testing.T, ending string) []string {
	t.Helper()
	var found []string
	err := filepath.WalkDir("../..", func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name := entry.Name(); entry.IsDir() && strings.HasPrefix(name, ".") && name != ".." {
			return filepath.SkipDir
		}
		if strings.HasSuffix(path, ending) {
			found = append(found, path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// normal removes indentation, which differs inside a function.
func normal(code string) string {
	var lines []string
	for line := range strings.Lines(code) {
		lines = append(lines, strings.TrimSpace(line))
	}
	return strings.Join(lines, "\n")
}

// The code of examples/guides. It is here so that the compiler checks it.

var _ = []any{newPool, behindPooler}

func newPool(ctx context.Context, url, name string, conns int32) (*pgxpool.Pool, error) {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	cfg.MaxConns = conns
	cfg.ConnConfig.RuntimeParams["application_name"] = name // shown in pg_stat_activity
	cfg.MaxConnLifetime = 30 * time.Minute                  // new servers get their share
	cfg.MaxConnLifetimeJitter = 5 * time.Minute             // not all at once
	txretry.PreparePool(cfg)                                // sets the time limits that pgxpool lacks
	return pgxpool.NewWithConfig(ctx, cfg)
}

func behindPooler(direct, pooled *pgxpool.Pool) (store *outboxpgx.Store, err error) {
	// the relay connects directly, because it must LISTEN
	store, err = outboxpgx.New(direct, outboxpgx.Config{})
	// or it polls once a second
	store, err = outboxpgx.New(pooled, outboxpgx.Config{PollOnly: true})
	return store, err
}

var (
	link  = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	block = regexp.MustCompile("(?s)```.*?```")
)

// TestLinks: every link of a document to a file in the repository has a target.
func TestLinks(t *testing.T) {
	t.Parallel()
	links := 0
	for _, file := range append(files(t, ".md"), "../../llms.txt") {
		for _, found := range link.FindAllStringSubmatch(block.ReplaceAllString(read(t, file), ""), -1) {
			target, _, _ := strings.Cut(found[1], "#")
			if target == "" || strings.Contains(target, "://") || strings.HasPrefix(target, "mailto:") {
				continue
			}
			links++
			if _, err := os.Stat(filepath.Join(filepath.Dir(file), target)); err != nil {
				t.Errorf("%s links %s, which does not exist", file, target)
			}
		}
	}
	if links == 0 {
		t.Error("no document has links")
	}
}

// ownCode finds the codes of problems: in literals, in constants and in methods.
var ownCode = regexp.MustCompile(`(?:Code: +|Code[A-Z][A-Za-z]+ += |Code\(\) string +\{ return )"([A-Z][A-Z_]+)"`)

// TestProblems: every problem type links to an existing heading, and each heading is a code.
func TestProblems(t *testing.T) {
	t.Parallel()
	codes := map[string]bool{}
	for _, file := range files(t, ".go") {
		if strings.HasSuffix(file, "_test.go") || strings.Contains(file, "/examples/") || strings.Contains(file, "/internal/") {
			continue
		}
		for _, found := range ownCode.FindAllStringSubmatch(read(t, file), -1) {
			codes[found[1]] = true
		}
	}
	headings := map[string]bool{}
	for line := range strings.Lines(read(t, "../../examples/guides/problems.md")) {
		if heading, ok := strings.CutPrefix(line, "## "); ok {
			headings[strings.TrimSpace(heading)] = true
		}
	}
	if !maps.Equal(codes, headings) {
		t.Errorf("codes %v, headings of problems.md %v", slices.Sorted(maps.Keys(codes)), slices.Sorted(maps.Keys(headings)))
	}
}

// Migration tools use one sequence of numbers: no two packages share a number. Each file has another one that
// undoes it.
func TestMigrations_haveUniqueNumbers(t *testing.T) {
	t.Parallel()
	all, err := filepath.Glob("../../*/*/migrations/*.sql")
	if err != nil {
		t.Fatal(err)
	}
	names, packages := map[string]bool{}, map[string]string{}
	for _, path := range all {
		name, number := filepath.Base(path), filepath.Base(path)[:4]
		names[name] = true
		if strings.HasSuffix(name, ".down.sql") {
			continue
		}
		if other := packages[number]; other != "" {
			t.Errorf("%s: %s has the same number", path, other)
		}
		packages[number] = path
	}
	for _, path := range packages {
		if down := strings.TrimSuffix(filepath.Base(path), ".sql") + ".down.sql"; !names[down] {
			t.Errorf("%s: there is no %s", path, down)
		}
	}
	if len(packages) < 5 {
		t.Errorf("%d migrations were found", len(packages))
	}
}

var (
	testName = regexp.MustCompile(`\bTest[A-Z]\w*`)
	testFunc = regexp.MustCompile(`(?m)^func (Test\w+)\(`)
)

// TestReliabilityNamesTests: every test named in reliability.md exists, and every fault has one.
func TestReliabilityNamesTests(t *testing.T) {
	t.Parallel()
	declared := map[string]bool{}
	for _, file := range files(t, "_test.go") {
		for _, found := range testFunc.FindAllStringSubmatch(read(t, file), -1) {
			declared[found[1]] = true
		}
	}
	_, faults, ok := strings.Cut(read(t, "../lab/reliability.md"), "\n| fault | found by | test |\n|---|---|---|\n")
	if !ok {
		t.Fatal("the page has no table of faults")
	}
	faults, _, _ = strings.Cut(faults, "\n\n")
	for row := range strings.Lines(faults) {
		names := testName.FindAllString(row, -1)
		if len(names) == 0 {
			t.Errorf("no test for %s", row)
		}
		for _, name := range names {
			if !declared[name] {
				t.Errorf("there is no %s, for %s", name, row)
			}
		}
	}
}

// TestNestedModules: a release sets the version that each module for users requires.
func TestNestedModules(t *testing.T) {
	t.Parallel()
	var modules []string
	for _, used := range regexp.MustCompile(`(?m)^\t\./(.+)$`).FindAllStringSubmatch(read(t, "../../go.work"), -1) {
		if !strings.HasPrefix(used[1], "examples/") && !strings.HasPrefix(used[1], "internal/") {
			modules = append(modules, used[1])
		}
	}
	listed := regexp.MustCompile(`(?m)^NESTED +:= (.+)$`).FindStringSubmatch(read(t, "../../Makefile"))
	if len(listed) != 2 || !slices.Equal(modules, strings.Fields(listed[1])) {
		t.Errorf("the Makefile releases %q, go.work has %q", listed, modules)
	}
}

// TestVersions: all images of a product have one version, and the README lists it as tested.
func TestVersions(t *testing.T) {
	t.Parallel()
	images := regexp.MustCompile(`\b(postgres|redis|rabbitmq):([0-9.]+)-`)
	versions := map[string]string{}
	for file, want := range map[string]int{
		"compose.yaml": 3, "examples/reservation/servers.go": 3, "internal/lab/servers/ladder.go": 3, "internal/testenv/postgres.go": 1,
	} {
		found := images.FindAllStringSubmatch(read(t, "../../"+file), -1)
		if len(found) != want {
			t.Errorf("%s names %d images, want %d", file, len(found), want)
		}
		for _, image := range found {
			product, version := image[1], image[2]
			if versions[product] == "" {
				versions[product] = version
			}
			if version != versions[product] {
				t.Errorf("%s names %s %s, another file %s", file, product, version, versions[product])
			}
		}
	}
	_, tested, _ := strings.Cut(read(t, "../../README.md"), "\nTested with ")
	tested, _, _ = strings.Cut(tested, "\n")
	for product, name := range map[string]string{"postgres": "PostgreSQL", "redis": "Redis", "rabbitmq": "RabbitMQ"} {
		if !regexp.MustCompile(name + `[0-9., and]* ` + regexp.QuoteMeta(versions[product]) + `\b`).MatchString(tested) {
			t.Errorf("the README does not say that %s %s is tested: %q", name, versions[product], tested)
		}
	}
}

// TestDeadLetters_listMembers: go doc hides the fields and methods behind an alias, so the comment of the alias lists them.
func TestDeadLetters_listMembers(t *testing.T) {
	t.Parallel()
	for file, types := range map[string][]reflect.Type{
		"outbox": {
			reflect.TypeFor[outbox.DeadLetters](), reflect.TypeFor[outbox.DeadLetter](), reflect.TypeFor[outbox.Group](),
			reflect.TypeFor[outbox.Filter](), reflect.TypeFor[outbox.Replay](), reflect.TypeFor[outbox.Removal](), reflect.TypeFor[outbox.Replayed](),
		},
		"inbox": {
			reflect.TypeFor[inbox.DeadLetters](), reflect.TypeFor[inbox.DeadLetter](), reflect.TypeFor[inbox.Group](),
			reflect.TypeFor[inbox.Filter](), reflect.TypeFor[inbox.Replay](), reflect.TypeFor[inbox.Removal](), reflect.TypeFor[inbox.Replayed](),
		},
	} {
		text := read(t, "../../"+file+"/deadletter.go")
		for _, typ := range types {
			name, _, _ := strings.Cut(typ.Name(), "[")
			comment := regexp.MustCompile(`((?:\t//.*\n)+)\t` + name + ` = `).FindString(text)
			for _, member := range members(typ) {
				if !regexp.MustCompile(`\b` + member + `\b`).MatchString(comment) {
					t.Errorf("the comment of %s.%s does not name %s", file, name, member)
				}
			}
		}
	}
}

// members returns the names of a struct's fields or of an interface's methods.
func members(typ reflect.Type) (names []string) {
	if typ.Kind() == reflect.Interface {
		for i := range typ.NumMethod() {
			names = append(names, typ.Method(i).Name)
		}
		return names
	}
	for i := range typ.NumField() {
		names = append(names, typ.Field(i).Name)
	}
	return names
}
