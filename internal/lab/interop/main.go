// Command interop tests other implementations of messaging against ours, in both directions, on RabbitMQ and Redis:
//
//	go run ./internal/lab/interop [-record]
//
// The peers are Symfony Messenger on PHP, pika and redis-py on Python, and amqplib on Node.js. As root on Debian and Ubuntu
// the command installs missing peers. Elsewhere it prints their names and exits with 2. The servers come from
// internal/lab/servers. With -record it writes the messages on the wire to the fixtures of the suites. It prints the output
// of each peer, and exits with the code of the tests.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/holdfast-go/holdfast/internal/lab/apt"
)

// exitUnusable is the exit code if a required program or right is missing.
const exitUnusable = 2

// peersVar is the folder with the peers' programs and their dependencies.
const peersVar = "HOLDFAST_INTEROP_PEERS"

// packages are the required Debian packages.
var packages = strings.Fields("php-cli php-amqp php-redis php-symfony-messenger php-symfony-amqp-messenger php-symfony-redis-messenger " +
	"php-symfony-serializer php-symfony-property-access php-symfony-property-info php-symfony-event-dispatcher php-symfony-error-handler " +
	"python3-pika python3-psycopg2 python3-redis")

func main() {
	record := flag.Bool("record", false, "write the messages on the wire into the fixtures of the suites")
	flag.Parse()
	code, err := run(*record)
	if err != nil {
		fmt.Fprintln(os.Stderr, "interop:", err)
	}
	os.Exit(code)
}

func run(record bool) (int, error) {
	out, err := exec.Command("go", "env", "GOWORK").Output()
	if err != nil {
		return exitUnusable, err
	}
	folder := filepath.Join(filepath.Dir(strings.TrimSpace(string(out))), "internal/lab/interop")
	if err := installPackages(); err != nil {
		return exitUnusable, err
	}
	peers, err := os.MkdirTemp("", "interop")
	if err != nil {
		return exitUnusable, err
	}
	defer os.RemoveAll(peers)
	if err := os.CopyFS(peers, os.DirFS(filepath.Join(folder, "peers"))); err != nil {
		return exitUnusable, err
	}
	npm := exec.Command("npm", "ci", "--prefix", peers, "--no-audit", "--no-fund", "--silent") // as in the lock file
	npm.Stdout, npm.Stderr = os.Stderr, os.Stderr
	if err := npm.Run(); err != nil {
		return exitUnusable, fmt.Errorf("npm ci: %w", err)
	}
	args := []string{"run", "./internal/lab/servers", "--", "go", "test", "-tags=interop", "-v", "-count=1", "-timeout=20m", "./internal/lab/interop"}
	if record {
		args = append(args, "-args", "-record")
	}
	cmd := exec.Command("go", args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = filepath.Join(folder, "../../.."), os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), peersVar+"="+peers, "HOLDFAST_REQUIRE_SERVERS=1")
	if err := cmd.Run(); err != nil {
		return 1, err
	}
	return 0, nil
}

// installPackages installs missing packages if that works without asking. Node.js with npm may come from elsewhere.
func installPackages() error {
	missing := apt.Missing(packages...)
	if _, err := exec.LookPath("npm"); err != nil {
		missing = append(missing, "nodejs", "npm")
	}
	if len(missing) == 0 {
		return nil
	}
	if !apt.CanInstall() {
		return fmt.Errorf("missing Debian packages: %s", strings.Join(missing, " "))
	}
	return apt.Install(context.Background(), missing...)
}
