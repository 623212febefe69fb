package testenv

import (
	"cmp"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// findPostgres returns the folder that holds initdb and postgres, of the newest version there is.
func findPostgres() (string, error) {
	servers := newestFirst("/usr/lib/postgresql/*/bin/postgres", "/usr/pgsql-*/bin/postgres",
		"/opt/homebrew/opt/postgresql@*/bin/postgres", "/usr/local/opt/postgresql@*/bin/postgres")
	if path, err := exec.LookPath("postgres"); err == nil {
		servers = append(servers, path)
	}
	for _, server := range servers {
		dir := filepath.Dir(server)
		if _, err := exec.LookPath(filepath.Join(dir, "initdb")); err == nil {
			return dir, nil
		}
	}
	return "", fmt.Errorf("%w: PostgreSQL (initdb, postgres)", ErrNotInstalled)
}

// PgBouncerInstalled reports whether this machine has a PgBouncer for Private.
func PgBouncerInstalled() bool {
	_, err := findPgBouncer()
	return err == nil
}

func findPgBouncer() (string, error) {
	for _, name := range []string{"pgbouncer", "/usr/sbin/pgbouncer", "/opt/homebrew/bin/pgbouncer", "/usr/local/bin/pgbouncer"} {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("%w: PgBouncer (pgbouncer)", ErrNotInstalled)
}

// PrometheusInstalled reports whether this machine has a Prometheus for Private, and promtool.
func PrometheusInstalled() bool {
	_, err := findPrometheus()
	return err == nil
}

func findPrometheus() (string, error) {
	path, err := exec.LookPath("prometheus")
	if err == nil {
		_, err = exec.LookPath("promtool")
	}
	if err != nil {
		return "", fmt.Errorf("%w: Prometheus (prometheus, promtool)", ErrNotInstalled)
	}
	return path, nil
}

func findRedis() (string, error) {
	for _, name := range []string{"redis-server", "valkey-server"} {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("%w: Redis (redis-server)", ErrNotInstalled)
}

// findRabbitMQ returns the server's own start script and epmd. The wrapper that
// Debian puts into the PATH would switch to another user and folder, so it comes last.
func findRabbitMQ() (script, epmd string, err error) {
	scripts := newestFirst("/usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmq-server")
	for _, name := range []string{"rabbitmq-server", "/opt/homebrew/sbin/rabbitmq-server", "/usr/local/sbin/rabbitmq-server"} {
		if path, err := exec.LookPath(name); err == nil {
			scripts = append(scripts, path)
		}
	}
	mappers := newestFirst("/usr/lib/erlang/erts-*/bin/epmd", "/usr/local/lib/erlang/erts-*/bin/epmd")
	if path, err := exec.LookPath("epmd"); err == nil {
		mappers = slices.Insert(mappers, 0, path)
	}
	if len(scripts) == 0 || len(mappers) == 0 {
		return "", "", fmt.Errorf("%w: RabbitMQ (rabbitmq-server, epmd)", ErrNotInstalled)
	}
	return scripts[0], mappers[0], nil
}

// ServersMissing returns the Debian packages of the servers that this machine lacks: Postgres, Redis and RabbitMQ.
func ServersMissing() []string {
	var packages []string
	if _, err := findPostgres(); err != nil {
		packages = append(packages, "postgresql")
	}
	if _, err := findRedis(); err != nil {
		packages = append(packages, "redis-server")
	}
	if _, _, err := findRabbitMQ(); err != nil {
		packages = append(packages, "rabbitmq-server")
	}
	return packages
}

// newestFirst returns the files matching the patterns, the highest version in the path first.
func newestFirst(patterns ...string) []string {
	var found []string
	for _, pattern := range patterns {
		matches, err := filepath.Glob(pattern)
		if err == nil { // the only error is a malformed pattern
			found = append(found, matches...)
		}
	}
	slices.SortStableFunc(found, func(a, b string) int {
		return slices.CompareFunc(versionIn(b), versionIn(a), cmp.Compare)
	})
	return found
}

// versionIn returns the numbers in a path, such as 15 or 3, 10, 8.
func versionIn(path string) []int {
	var version []int
	for _, digits := range strings.FieldsFunc(path, func(r rune) bool { return r < '0' || r > '9' }) {
		if n, err := strconv.Atoi(digits); err == nil {
			version = append(version, n)
		}
	}
	return version
}
