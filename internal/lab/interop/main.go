// Command interop drives other implementations of messaging against ours, both ways, on RabbitMQ and
// Redis:
//
//	go run ./internal/lab/interop [-record]
//
// They are Symfony Messenger on PHP, pika and redis-py on Python, and amqplib on Node.js. As root on Debian and Ubuntu
// it installs what is missing of them; elsewhere it says what to install and exits with 2. The
// servers come from internal/lab/servers. With -record what went over the wire is written to the
// fixtures of the suites. It prints what each of them said, and exits with the code of the tests.
package main

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// exitUnusable is the exit code when something is missing that the command cannot get.
const exitUnusable = 2

// peersVar tells the tests where the programs of peers are, with all that they need.
const peersVar = "HOLDFAST_INTEROP_PEERS"

// packages are Debian's.
var packages = strings.Fields("php-cli php-amqp php-redis php-symfony-messenger php-symfony-amqp-messenger php-symfony-redis-messenger " +
	"php-symfony-serializer php-symfony-property-access php-symfony-property-info php-symfony-event-dispatcher php-symfony-error-handler " +
	"python3-pika python3-psycopg2 python3-redis nodejs")

func main() {
	record := flag.Bool("record", false, "write what was seen into the fixtures of the suites")
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
	if err := command("npm", "ci", "--prefix", peers, "--no-audit", "--no-fund", "--silent"); err != nil { // as the lock file says
		return exitUnusable, err
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

// installPackages gets what is missing of the packages, where that takes no question.
func installPackages() error {
	missing := missingPackages()
	if len(missing) == 0 {
		return nil
	}
	apt, err := exec.LookPath("apt-get")
	if err != nil || os.Geteuid() != 0 {
		return fmt.Errorf("missing, as Debian names them: %s", strings.Join(missing, " "))
	}
	for _, args := range [][]string{{"update", "-q"}, append([]string{"install", "-q", "-y", "--no-install-recommends", "--no-remove"}, missing...)} {
		if err := command(apt, args...); err != nil {
			return err
		}
	}
	return nil
}

// missingPackages asks for what they bring, which may come from elsewhere.
func missingPackages() (missing []string) {
	for _, name := range packages {
		if name == "nodejs" {
			if _, err := exec.LookPath("npm"); err != nil {
				missing = append(missing, "nodejs", "npm")
			}
			continue
		}
		out, err := exec.Command("dpkg-query", "-W", "-f=${Status}", name).Output()
		if err != nil || !strings.HasSuffix(string(out), " installed") {
			missing = append(missing, name)
		}
	}
	return missing
}

func command(name string, args ...string) error {
	cmd := exec.Command(name, args...)
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s %s: %w", filepath.Base(name), args[0], err)
	}
	return nil
}
