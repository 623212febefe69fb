package main_test

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/holdfast-go/holdfast/internal/pgtest"
)

// deployedTo is a machine with the program and the environment file that deploy tells of, both in folders of the test.
type deployedTo struct {
	t           testing.TB
	bin, config string
}

func deployTo(t testing.TB, s services) deployedTo {
	t.Helper()
	d := deployedTo{t, filepath.Dir(shopBinary(t)), t.TempDir()}
	text := fmt.Sprintf("DATABASE_URL='%s'\nREDIS_URL='%s'\nAMQP_URL='%s'\n", s.databaseURL, s.redisURL, s.amqpURL)
	if err := os.WriteFile(filepath.Join(d.config, "reservation.env"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return d
}

// file returns a file of deploy with the folders of this machine in it.
func (d deployedTo) file(name string) string {
	d.t.Helper()
	text, err := os.ReadFile(filepath.Join("deploy", name))
	if err != nil {
		d.t.Fatal(err)
	}
	return strings.NewReplacer("/usr/local/bin", d.bin, "/etc/", d.config+"/").Replace(string(text))
}

// crontab returns the commands of the crontab, and the variables that it sets.
func (d deployedTo) crontab() (commands, env []string) {
	d.t.Helper()
	job := regexp.MustCompile(`^(?:\S+\s+){5}shop\s+(.+)$`)
	variable := regexp.MustCompile(`^[A-Z_]+=.+$`)
	for line := range strings.Lines(d.file("crontab")) {
		line = strings.TrimSpace(line)
		switch found := job.FindStringSubmatch(line); {
		case strings.HasPrefix(line, "#"):
		case variable.MatchString(line):
			env = append(env, line)
		case found == nil || strings.Contains(line, "%"): // cron ends the command there
			d.t.Fatalf("%q is no job", line)
		default:
			commands = append(commands, found[1])
		}
	}
	return commands, env
}

// withoutEnvironment is a command with nothing in its environment but env.
func withoutEnvironment(env []string, name string, args ...string) *exec.Cmd {
	cmd := exec.Command(name, args...)
	cmd.Env = append([]string{"HOME=/", "LOGNAME=shop"}, env...) // as cron sets them
	dieWithTests(cmd)
	return cmd
}

// TestCrontabHasAnEnvironment runs the jobs as cron does. It is on the servers of the file that they find no tables before
// setup, and find them afterwards; without the file they do nothing.
func TestCrontabHasAnEnvironment(t *testing.T) {
	t.Parallel()
	s := newServices(t)
	d := deployTo(t, s)
	commands, env := d.crontab()
	if len(commands) != 3 {
		t.Fatalf("%d jobs", len(commands))
	}
	runtime.LockOSThread() // a job dies with this thread
	defer runtime.UnlockOSThread()
	run := func(job string) (string, error) {
		out, err := withoutEnvironment(env, "/bin/sh", "-c", job).CombinedOutput()
		return string(out), err
	}
	for _, job := range commands {
		if out, err := run(job); err == nil || !strings.Contains(out, "does not exist") {
			t.Errorf("%s before setup: %v\n%s", job, err, out)
		}
	}
	if code, _, errs := command(t, s.env(), "setup"); code != 0 {
		t.Fatalf("setup exits with %d: %s", code, errs)
	}
	for _, job := range commands {
		job = strings.Replace(job, "--time-limit=55", "--time-limit=0", 1) // there is nothing to wait for
		if out, err := run(job); err != nil {
			t.Errorf("%s: %v\n%s", job, err, out)
		}
	}
	if err := os.Remove(filepath.Join(d.config, "reservation.env")); err != nil {
		t.Fatal(err)
	}
	for _, job := range commands {
		if out, err := run(job); err == nil || !strings.Contains(out, "reservation.env") {
			t.Errorf("%s without the file: %v\n%s", job, err, out)
		}
	}
}

// TestSupervisedHaveAnEnvironment runs the programs as supervisord does, each on servers of its own, which it sets up, and
// stops them by the signal that supervisord sends.
func TestSupervisedHaveAnEnvironment(t *testing.T) {
	t.Parallel()
	commands := regexp.MustCompile(`(?m)^command=(\S+) -c "([^"]*)"$`)
	for i := range 3 {
		t.Run(fmt.Sprint("program ", i+1), func(t *testing.T) {
			t.Parallel()
			s := newServices(t)
			programs := commands.FindAllStringSubmatch(deployTo(t, s).file("supervisor.conf"), -1)
			if len(programs) != 3 {
				t.Fatalf("%d programs", len(programs))
			}
			runSupervised(t, withoutEnvironment(nil, programs[i][1], "-c", programs[i][2]))
			var rows int
			err := pgtest.Pool(t, s.databaseURL, 1).QueryRow(t.Context(), "SELECT count(*) FROM reservations").Scan(&rows)
			if err != nil {
				t.Errorf("the program was elsewhere: %v", err)
			}
		})
	}
}

// runSupervised runs a role until it has set up its servers, and then wants it to end well.
func runSupervised(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var errs buffer
	cmd.Stderr = &errs
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(stdout)
	running := lines.Scan() && strings.HasPrefix(lines.Text(), "reservation: running (backend services")
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Error(err)
	}
	_, _ = io.Copy(io.Discard, stdout) // it ends when the process does
	if err := cmd.Wait(); err != nil || !running {
		t.Errorf("%v: running %v, then %v\n%s", cmd.Args, running, err, errs.String())
	}
}
