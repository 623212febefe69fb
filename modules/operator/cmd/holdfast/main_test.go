package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
)

// TestMain runs the program instead of the tests where the binary has the program's name: tests start it by a link.
func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == program {
		main()
	}
	os.Exit(testenv.Run(m))
}

// holdfast runs the program in a folder.
func holdfast(t *testing.T, dir string, env []string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	self, err := os.Executable()
	must(t, err)
	link := filepath.Join(t.TempDir(), program)
	must(t, os.Symlink(self, link))
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(t.Context(), link, args...)
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = dir, env, &out, &errs
	err = cmd.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return exit.ExitCode(), out.String(), errs.String()
	}
	must(t, err)
	return 0, out.String(), errs.String()
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// inTheReadme returns the file that the README shows.
func inTheReadme(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("../../README.md")
	must(t, err)
	_, after, _ := strings.Cut(string(text), "```yaml\n")
	yaml, _, found := strings.Cut(after, "```")
	if !found {
		t.Fatal("the README shows no file")
	}
	return yaml
}

// The file of the README operates a service on real servers, with the commands of a cron relay.
func TestHoldfast_readme(t *testing.T) {
	t.Parallel()
	dir, database, redisURL, broker := t.TempDir(), pgtest.URL(t), redistest.URL(t), amqptest.New(t)
	must(t, os.WriteFile(filepath.Join(dir, "holdfast.yaml"), []byte(inTheReadme(t)), 0o600))
	env := []string{"DATABASE_URL=" + database, "REDIS_URL=" + redisURL, "AMQP_URL=" + broker.URL}
	wants := func(want int, part string, args ...string) {
		t.Helper()
		code, out, errs := holdfast(t, dir, env, args...)
		if code != want || !strings.Contains(out+errs, part) {
			t.Errorf("%q exits with %d, want %d and %q: %s%s", args, code, want, part, out, errs)
		}
	}
	// reads is wants for a command that changes nothing. It repeats the command, which fails while a server is slow.
	reads := func(want int, part string, args ...string) {
		t.Helper()
		testenv.Eventually(t, func() error {
			code, out, errs := holdfast(t, dir, env, args...)
			if code != want || !strings.Contains(out+errs, part) {
				return fmt.Errorf("%q exits with %d, want %d and %q: %s%s", args, code, want, part, out, errs)
			}
			return nil
		})
	}
	pool := pgtest.Pool(t, database, 2)
	_, err := pool.Exec(t.Context(), `CREATE TABLE reservations (id bigint PRIMARY KEY, status text NOT NULL, expires_at timestamptz NOT NULL);
		CREATE INDEX ON reservations (expires_at, id) WHERE status = 'held'; INSERT INTO reservations VALUES (1, 'held', now() - interval '1 hour')`)
	must(t, err)

	wants(1, "the command setup creates", "doctor")
	wants(1, "run `holdfast setup` first", "outbox", "dead")
	wants(2, "run `holdfast setup` first", "relay")
	wants(0, "billing: broker", "setup")
	reads(1, "billing", "status")
	redisAt, err := redis.ParseURL(redisURL)
	must(t, err)
	claims := redis.NewClient(redisAt)
	defer func() { _ = claims.Close() }()
	must(t, claims.Set(t.Context(), "idempotency:lock:of a run", "token", time.Hour).Err())
	reads(1, "\ngate         1\n", "status")
	reads(0, "holds  1", "expiry", "due")
	reads(0, "100", "limits", "show", "ada")
	reads(0, "gate         free", "idempotency", "show", "order-1", "--scope=ada")
	wants(2, "there is no sweeper", "sweep")
	reads(0, "all\nuser\n:4\n", "__complete", "limits", "show", "ada", "--limit", "")
	reads(0, "billing\ninbox\noutbox\n:4\n", "__complete", "retry", "--from", "")
	reads(0, "yaml\nyml\n:8\n", "__complete", "status", "--config", "")

	store, err := outboxpgx.New(pool, outboxpgx.Config{})
	must(t, err)
	send := func(names ...string) {
		t.Helper()
		must(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			for _, name := range names {
				m, err := outbox.NewMessage(name, map[string]string{})
				if err == nil {
					err = store.Write(t.Context(), tx, m)
				}
				if err != nil {
					return err
				}
			}
			return nil
		}))
	}
	send("order.placed", "order.paid")
	wants(0, "published 2, failed 0, dead 0\n", "relay", "--limit=1000")
	if n := broker.Depth(t, "billing"); n != 2 {
		t.Errorf("%d messages in the queue", n)
	}
	wants(0, "published 0, failed 0, dead 0\n", "relay", "--limit=1000", "--time-limit=1")
	send("nobody.listens") // no binding takes it
	wants(1, "published 0, failed 1", "relay", "--limit=1000", "--time-limit=0")
	wants(2, "must be at least 1", "--config="+filepath.Join(dir, "holdfast.yaml"), "relay", "--limit=0")

	broker.Publish(t, "", "billing.failed.default", amqp.Publishing{Body: []byte("{}")})
	reads(1, "default 1", "status")
}

// Rows within the service's retention are neither reported nor deleted.
func TestHoldfast_retention(t *testing.T) {
	t.Parallel()
	dir, database := t.TempDir(), pgtest.URL(t)
	config := "outboxes: [{retention: 2160h}]\nconsumers: [{name: billing, queue: billing, table: holdfast_inbox, retention: 720h}]"
	must(t, os.WriteFile(filepath.Join(dir, "holdfast.yaml"), []byte(config), 0o600))
	env := []string{"DATABASE_URL=" + database, "AMQP_URL=" + amqptest.New(t).URL}
	succeeds := func(args ...string) {
		t.Helper()
		testenv.Eventually(t, func() error {
			if code, out, errs := holdfast(t, dir, env, args...); code != 0 {
				return fmt.Errorf("%q exits with %d: %s%s", args, code, out, errs)
			}
			return nil
		})
	}
	succeeds("setup")
	pool := pgtest.Pool(t, database, 1)
	_, err := pool.Exec(t.Context(), `INSERT INTO holdfast_inbox (consumer, message_id, processed_at) VALUES ('billing', gen_random_uuid(), now() - interval '10 days')`)
	must(t, err)
	store, err := outboxpgx.New(pool, outboxpgx.Config{})
	must(t, err)
	m, err := outbox.NewMessage("order.placed", map[string]string{})
	must(t, err)
	must(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return store.Write(t.Context(), tx, m) }))
	_, err = pool.Exec(t.Context(), `UPDATE holdfast_outbox SET published_at = now() - interval '10 days'`)
	must(t, err)
	succeeds("doctor")
	succeeds("prune")
	var left int
	must(t, pool.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM holdfast_inbox) + (SELECT count(*) FROM holdfast_outbox)`).Scan(&left))
	if left != 2 {
		t.Errorf("%d of 2 rows are left, all within their retention", left)
	}
}

// Limits and keys are read under the service's prefix and tag, not others of the same names.
func TestHoldfast_keysOnRedis(t *testing.T) {
	t.Parallel()
	dir, redisURL := t.TempDir(), redistest.URL(t)
	config := "limits: [{name: user, max: 100, window: 1h}, {name: user, max: 100, window: 1h, prefix: 'b:c', tag: t}]\n" +
		"idempotency: [{name: a, prefix: idempotency}, {name: b, prefix: b, hash_tag: true}]"
	must(t, os.WriteFile(filepath.Join(dir, "holdfast.yaml"), []byte(config), 0o600))
	at, err := redis.ParseURL(redisURL)
	must(t, err)
	client := redis.NewClient(at)
	defer func() { _ = client.Close() }()
	limiter, err := ratelimitredis.New(client, ratelimitredis.Config{Prefix: "b:c", Tag: "t", Timeout: testenv.Patience})
	must(t, err)
	_, err = limiter.Allow(t.Context(), ratelimit.Charge{Limit: ratelimit.Limit{Name: "user", Max: 100, Window: time.Hour}, Key: "ada", Cost: 40})
	must(t, err)
	keys, err := idempotencyredis.New(client, idempotencyredis.Config{Prefix: "b", HashTag: true})
	must(t, err)
	key := idempotency.NewKey()
	_, _, err = idempotency.Do(t.Context(), keys, key, nil, func(context.Context) (idempotency.Response, error) {
		return idempotency.JSON(201, "placed")
	})
	must(t, err)
	shows := func(want []string, args ...string) {
		t.Helper()
		testenv.Eventually(t, func() error {
			code, out, errs := holdfast(t, dir, []string{"REDIS_URL=" + redisURL}, args...)
			for _, part := range want {
				if code != 0 || !regexp.MustCompile(part).MatchString(out) {
					return fmt.Errorf("%q exits with %d, want 0 and %q: %s%s", args, code, part, out, errs)
				}
			}
			return nil
		})
	}
	shows([]string{`(?m)^limits +user +100 +\S+ +100\b`, `(?m)^limits-2 +user +100 +\S+ +60\b`}, "limits", "show", "ada")
	shows([]string{`(?m)^a +free`, `(?m)^b +done`}, "idempotency", "show", string(key))
}

// Setup accepts a database that the printed SQL has made, and the SQL of --down removes everything again.
func TestHoldfast_schemaPrint(t *testing.T) {
	t.Parallel()
	dir, database := t.TempDir(), pgtest.URL(t)
	config := "outboxes: [{retention: 0s}]\nidempotency: [{}]\nconsumers: [{name: a, queue: a, table: holdfast_inbox, retention: 1h}, {name: b, queue: b, table: holdfast_inbox, retention: 1h}, {name: c, queue: c, table: other, retention: 1h}]"
	must(t, os.WriteFile(filepath.Join(dir, "holdfast.yaml"), []byte(config), 0o600))
	env := []string{"DATABASE_URL=" + database, "AMQP_URL=" + testenv.AMQPURL(t)}
	holdfast := func(args ...string) string {
		t.Helper()
		code, out, errs := holdfast(t, dir, env, args...)
		if code != 0 {
			t.Fatalf("%q exits with %d: %s", args, code, errs)
		}
		return out
	}
	pool := pgtest.Pool(t, database, 1)
	tables := func() (n int) {
		t.Helper()
		must(t, pool.QueryRow(t.Context(), `SELECT count(*) FROM pg_class WHERE relkind = 'r' AND relnamespace = current_schema()::regnamespace`).Scan(&n))
		return n
	}
	up, down := holdfast("schema", "print"), holdfast("schema", "print", "--down")
	_, err := pool.Exec(t.Context(), up)
	must(t, err)
	const own = 6 + 1 + 5 + 5 + 3 // outbox, idempotency, the inbox that a and b share, c's inbox, log, history and processes
	if n := tables(); n != own+1 {
		t.Errorf("%d tables, want %d and the table of migrations", n, own)
	}
	holdfast("setup") // finds them
	_, err = pool.Exec(t.Context(), down)
	must(t, err)
	if n := tables(); n != 1 {
		t.Errorf("%d tables are left, want the table of migrations", n)
	}
}

func TestHoldfast_schemaFiles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "holdfast.yaml"), []byte("outboxes: [{retention: 0s}, {name: second, table: second, retention: 0s}]"), 0o600))
	env := []string{"DATABASE_URL=postgres://x@127.0.0.1:1/x"} // nothing connects to it
	for tool, want := range map[string][]string{
		"goose":          {"000001_holdfast_outbox.sql", "000002_holdfast_outbox_1.sql", "000003_holdfast_outbox_write.sql", "000004_holdfast_outbox_write_1.sql"},
		"atlas":          {"000001_holdfast_outbox.sql", "000002_holdfast_outbox_1.sql", "000003_holdfast_outbox_write.sql", "000004_holdfast_outbox_write_1.sql"},
		"golang-migrate": {"000001_holdfast_outbox.down.sql", "000001_holdfast_outbox.up.sql", "000002_holdfast_outbox_1.down.sql"},
	} {
		folder := filepath.Join(dir, tool)
		must(t, os.Mkdir(folder, 0o755))
		print := func(args ...string) (int, string, string) {
			t.Helper()
			return holdfast(t, dir, env, append([]string{"schema", "print", "--format=" + tool, "--dir=" + folder}, args...)...)
		}
		code, planned, _ := print("--dry-run")
		if left, err := os.ReadDir(folder); code != 0 || len(left) != 0 || err != nil {
			t.Errorf("%s: a dry run exits with %d and leaves %v, %v", tool, code, left, err)
		}
		code, written, errs := print()
		if code != 0 || written != planned || written == "" {
			t.Errorf("%s exits with %d: wrote %q, planned %q: %s", tool, code, written, planned, errs)
		}
		for _, name := range want {
			if !strings.Contains(written, filepath.Join(folder, name)+"\n") {
				t.Errorf("%s: %s is not among %s", tool, name, written)
			}
		}
		if tool != "golang-migrate" { // which has two files for each number
			renamed := strings.Replace(want[0], "000001", "20260101120000", 1)
			must(t, os.Rename(filepath.Join(folder, want[0]), filepath.Join(folder, renamed)))
			must(t, os.Remove(filepath.Join(folder, want[1])))
			next := "20260101120001" + want[1][6:]
			if _, later, _ := print(); later != filepath.Join(folder, next)+"\n" {
				t.Errorf("%s: beside %s it writes %q, want %s", tool, renamed, later, next)
			}
			must(t, os.Rename(filepath.Join(folder, renamed), filepath.Join(folder, want[0])))
		}
		if code, again, _ := print(); code != 0 || again != "" {
			t.Errorf("%s: the second time it exits with %d and writes %q", tool, code, again)
		}
		must(t, os.WriteFile(filepath.Join(folder, want[0]), []byte("SELECT 1"), 0o600))
		if code, _, errs := print(); code != 1 || !strings.Contains(errs, "another content") {
			t.Errorf("%s: over another file it exits with %d: %s", tool, code, errs)
		}
	}
	for _, args := range [][]string{{"--format=magic"}, {"--format=goose"}, {"--dir=x"}, {"--dry-run"}, {"--format=goose", "--dir=x", "--down"}, {"x"}} {
		if code, _, errs := holdfast(t, dir, env, append([]string{"schema", "print"}, args...)...); code != 2 {
			t.Errorf("%q exits with %d: %s", args, code, errs)
		}
	}
}

func TestHoldfast_mistakes(t *testing.T) {
	t.Parallel()
	for text, part := range map[string]string{
		"outboxes: [{nome: x}]":                                      "there is no field nome",
		"outboxes: [{retention: soon}]":                              "got the text `soon`, want a duration",
		"outboxes: {a: 1}":                                           "got fields, want a list of entries",
		"consumers: [{name: x, partitions: many}]":                   "got the text `many`, want a whole number",
		"consumers: [{name: x, bindings: [often]}]":                  "got the text `often`, want fields",
		"consumers: [{name: x, classes: urgent}]":                    "got the text `urgent`, want a list of texts",
		"trace_url: /traces":                                         "want an address such as https://tempo.example/trace/{trace_id}",
		"outboxes: {":                                                "yaml",
		"outboxes: [{retention: 0s, exchange: a, stream: b}]":        "both set",
		"outboxes: [{exchange: a}]":                                  "retention",
		"consumers: [{name: x, queue: x, table: x}]":                 "retention",
		"consumers: [{name: x, queue: x, table: x, retention: -1h}]": "negative",
		"consumers: [{name: x}]":                                     "set queue",
		"consumers: [{name: x y, queue: x}]":                         "a name is",
		"limits: [{name: user, max: 1, algorithm: magic}]":           "none of sliding",
		"limits: [{name: user}]":                                     "Max",
		"sweeps: [{name: x, table: 'a\"b'}]":                         "sweep",
		"idempotency: [{prefix: p, table: t}]":                       "two stores",
		"idempotency: [{table: t}, {table: t}]":                      "taken",
	} {
		dir := t.TempDir()
		must(t, os.WriteFile(filepath.Join(dir, "holdfast.yaml"), []byte(text), 0o600))
		env := []string{"DATABASE_URL=postgres://x@127.0.0.1:1/x", "REDIS_URL=redis://127.0.0.1:1", "AMQP_URL=amqp://127.0.0.1:1"}
		if code, out, errs := holdfast(t, dir, env, "status"); code != 2 || out != "" || strings.Count(errs, "\n") != 1 || !strings.Contains(errs, part) || strings.Contains(errs, "main.") {
			t.Errorf("%s exits with %d: %s%s", text, code, out, errs)
		}
	}
	dir := t.TempDir()
	for part, args := range map[string][]string{
		"there is no none.yaml": {"--config", "none.yaml", "status"}, "there is no holdfast.yaml": {"doctor"},
		"--config has no value": {"status", "--config="}, "config": {"status", "--config"},
	} {
		if code, _, errs := holdfast(t, dir, nil, args...); code != 2 || !strings.Contains(errs, part) {
			t.Errorf("%q exits with %d: %s", args, code, errs)
		}
	}
	must(t, os.WriteFile(filepath.Join(dir, "other.yaml"), []byte("outboxes: [{retention: 0s}]"), 0o600))
	for _, env := range [][]string{{"HOLDFAST_CONFIG=other.yaml"}, {"HOLDFAST_CONFIG=other.yaml", "DATABASE_URL=mysql://root:secret@localhost/x"}} {
		code, _, errs := holdfast(t, dir, env, "status")
		if code != 2 || !strings.Contains(errs, "DATABASE_URL is not") || strings.Contains(errs, "secret") {
			t.Errorf("with %q it exits with %d: %s", env, code, errs)
		}
	}
	for _, config := range []string{"none.yaml", "other.yaml"} {
		for part, args := range map[string][]string{"doctor": {"help"}, "--config": {"retry", "--help"}, "__start_holdfast": {"completion", "bash"}} {
			if code, out, errs := holdfast(t, dir, []string{"HOLDFAST_CONFIG=" + config}, args...); code != 0 || !strings.Contains(out, part) {
				t.Errorf("%q with %s exits with %d: %.300s%s", args, config, code, out, errs)
			}
		}
	}
}

// A server that is down is reported once, and no command takes longer than doctor's limit.
func TestHoldfast_serversDown(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "holdfast.yaml"), []byte("outboxes: [{exchange: shop, retention: 0s}]\nconsumers: [{name: billing, queue: billing}]"), 0o600))
	env := []string{"DATABASE_URL=postgres://x@127.0.0.1:1/x", "AMQP_URL=amqp://127.0.0.1:1"}
	code, _, errs := holdfast(t, dir, env, "doctor")
	if code != 1 || strings.Count(errs, "\n") != 1 || strings.Count(errs, "Postgres is unreachable") != 1 || strings.Count(errs, "RabbitMQ is unreachable") != 1 {
		t.Errorf("doctor exits with %d: %s", code, errs)
	}
	code, out, errs := holdfast(t, dir, env, "status")
	if code != 1 || !strings.Contains(out, "billing") || strings.Count(errs, "\n") != 1 {
		t.Errorf("status exits with %d: %s%s", code, out, errs)
	}
}
