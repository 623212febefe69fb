package main

import (
	"encoding/json"
	"errors"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/command"
)

// deployed matches the program's arguments: behind its name in a crontab, a unit or a configuration, and
// as a list in a manifest or an image.
var (
	deployed = regexp.MustCompile(`(?m)^[^#;\n][^#\n]*[ /=]reservation((?: [-a-z][^\n"]*)?)"?$`)
	listed   = regexp.MustCompile(`(?:args: |CMD )(\[[^\]]*\])`)
)

func read(t *testing.T, path ...string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(path...))
	noError(t, err)
	return string(text)
}

// The environment that a deployed shop is given sets what the program reads, and nothing else.
func TestDeployedEnvironment(t *testing.T) {
	t.Parallel()
	text := read(t, "deploy/reservation.env")
	given := map[string]string{}
	for _, match := range regexp.MustCompile(`(?m)^([A-Z_]+)='([^']*)'$`).FindAllStringSubmatch(text, -1) {
		given[match[1]] = match[2]
	}
	read := map[string]bool{}
	_, err := parseConfig([]string{"-backend=services"}, func(name string) string {
		read[name] = true
		return given[name]
	}, io.Discard)
	if err != nil || len(given) != 3 {
		t.Errorf("%d variables: %v", len(given), err)
	}
	for name := range given {
		if !read[name] {
			t.Errorf("the program does not read %s", name)
		}
	}
}

// The commands of the crontab and of supervisord get the addresses of the file, in no other environment than theirs, and
// fail without the file. A stub stands for the program: TestDeployedFlags checks the arguments.
func TestDeployedCommands_environment(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	stub, file := filepath.Join(dir, "reservation"), filepath.Join(dir, "reservation.env")
	err := os.WriteFile(stub, []byte("#!/bin/sh\necho \"$DATABASE_URL $REDIS_URL $AMQP_URL $*\"\n"), 0o700)
	noError(t, errors.Join(err, os.WriteFile(file, []byte("DATABASE_URL='a b'\nREDIS_URL='c$d'\nAMQP_URL='e'\n"), 0o600)))
	commands, env := []string{}, []string{"HOME=/", "LOGNAME=shop"} // as cron sets them
	for name, pattern := range map[string]string{"crontab": `(?m)^(?:[^#\s]\S*\s+){5}shop\s+([^%\n]+)$`, "supervisor.conf": `(?m)^command=/bin/sh -c "([^"]*)"$`} {
		text := read(t, "deploy", name)
		here := strings.NewReplacer("/usr/local/bin", dir, "/etc/", dir+"/").Replace(text)
		for _, found := range regexp.MustCompile(pattern).FindAllStringSubmatch(here, -1) {
			commands = append(commands, found[1])
		}
		env = append(env, regexp.MustCompile(`(?m)^[A-Z_]+=.+$`).FindAllString(here, -1)...)
	}
	if len(commands) != 6 {
		t.Errorf("%d commands: %q", len(commands), commands)
	}
	run := func(command string) (string, error) {
		cmd := exec.CommandContext(t.Context(), "/bin/sh", "-c", command)
		cmd.Env = env
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	for _, command := range commands {
		if out, err := run(command); err != nil || !strings.HasPrefix(out, "a b c$d e ") {
			t.Errorf("%s: %v, %s", command, err, out)
		}
	}
	noError(t, os.Remove(file))
	for _, command := range commands {
		if out, err := run(command); err == nil || !strings.Contains(out, "reservation.env") {
			t.Errorf("%s without the file: %v, %s", command, err, out)
		}
	}
}

// TestDeployedUser wants no program of supervisord, which is root, to be run as root: its shell runs what a file says.
func TestDeployedUser(t *testing.T) {
	t.Parallel()
	text := read(t, "deploy/supervisor.conf")
	programs := strings.Split(text, "[program:")[1:]
	if len(programs) != 3 {
		t.Errorf("%d programs", len(programs))
	}
	for _, program := range programs {
		if name, options, _ := strings.Cut(program, "]\n"); !strings.Contains(options, "\nuser=shop\n") {
			t.Errorf("%s has no user", name)
		}
	}
}

// What the files of deploy run is what the program takes.
func TestDeployedFlags(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("deploy/*")
	noError(t, err)
	runs := map[string]int{}
	for _, file := range files {
		text := read(t, file)
		var all [][]string
		for _, match := range deployed.FindAllStringSubmatch(text, -1) {
			all = append(all, strings.Fields(match[1]))
		}
		for _, match := range listed.FindAllStringSubmatch(text, -1) {
			var args []string
			if err := json.Unmarshal([]byte(match[1]), &args); err != nil {
				t.Errorf("%s: %s: %v", file, match[1], err)
			}
			all = append(all, args)
		}
		for _, args := range all {
			if len(args) > 0 {
				runs[filepath.Base(file)]++
				checkArgs(t, file, args)
			}
		}
	}
	for file, want := range map[string]int{"crontab": 3, "reservation@.service": 2, "supervisor.conf": 3, "Dockerfile": 1, "kubernetes.yaml": 5} {
		if runs[file] != want {
			t.Errorf("%s runs the program %d times, want %d", file, runs[file], want)
		}
	}
}

func checkArgs(t *testing.T, file string, args []string) {
	t.Helper()
	for i := range args {
		args[i] = strings.ReplaceAll(args[i], "=%i", "=relay") // systemd's instance
	}
	cfg, err := parseConfig(args, nowhere, io.Discard)
	if err != nil {
		t.Errorf("%s: %q: %v", file, args, err)
		return
	}
	if len(cfg.command) == 0 {
		return
	}
	root, err := command.New(operator.Config{})
	noError(t, err)
	cmd, rest, err := root.Find(cfg.command)
	if err == nil {
		err = cmd.ParseFlags(rest)
	}
	if err != nil {
		t.Errorf("%s: %q: %v", file, args, err)
	}
}

// The addresses of compose.env are those of compose.yaml.
func TestComposedEnvironment(t *testing.T) {
	t.Parallel()
	text := read(t, "compose.env")
	composed := read(t, "../../compose.yaml")
	given := map[string]string{}
	for _, match := range regexp.MustCompile(`(?m)^export ([A-Z_]+)='([^']*)'$`).FindAllStringSubmatch(text, -1) {
		given[match[1]] = match[2]
		u, err := url.Parse(match[2])
		if err != nil || !strings.Contains(composed, `"`+u.Host+":"+u.Port()+`"`) {
			t.Errorf("%s: compose.yaml has no %s, %v", match[1], u, err)
		}
	}
	if _, err := parseConfig([]string{"-backend=services"}, func(name string) string { return given[name] }, io.Discard); err != nil {
		t.Error(err)
	}
}
