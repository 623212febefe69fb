package testenv

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// rabbitmq is a one-node RabbitMQ with the management plugin. It shares nothing with other nodes on the machine:
// folders, cookie, ports and the port mapper epmd are its own. epmd is a separate process that lives as long as the
// Server.
type rabbitmq struct {
	script string
	epmd   string
	dir    string
	host   Host
	extra  []string
	mapper *process

	port, adminPort, distPort, epmdPort int
}

func newRabbitMQ(spec Spec) (engine, error) {
	script, epmd, err := findRabbitMQ()
	if err != nil {
		return nil, err
	}
	r := &rabbitmq{script: script, epmd: epmd, host: spec.Host, extra: spec.Extra}
	for _, port := range []*int{&r.port, &r.adminPort, &r.distPort, &r.epmdPort} {
		if *port, err = FreePort(); err != nil {
			return nil, err
		}
	}
	if r.host.apart() { // nodes of a cluster expect each other at the same port
		r.epmdPort = 4369
	}
	return r, nil
}

// advanced has settings that rabbitmq.conf lacks. By default, a broker that cannot return a message from a retry
// queue, for example because it is stopping, retries after 3 minutes.
const advanced = "[{rabbit, [{dead_letter_worker_publisher_confirm_timeout, 5000}]}].\n"

func (r *rabbitmq) prepare(ctx context.Context, dir string) error {
	r.dir = dir
	files := map[string]string{
		"rabbitmq.conf":   r.config(),
		"advanced.config": advanced,
		"env.conf":        "",
		"enabled_plugins": "[rabbitmq_management].\n",
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	if r.host.apart() {
		if err := os.WriteFile(filepath.Join(dir, ".erlang.cookie"), []byte("holdfast"), 0o400); err != nil { // one for all nodes
			return err
		}
	}
	return r.startMapper(ctx)
}

func (r *rabbitmq) config() string {
	lines := append([]string{
		"listeners.tcp.1 = " + r.host.at(r.port),
		"management.tcp.ip = " + r.host.address(),
		fmt.Sprintf("management.tcp.port = %d", r.adminPort),
		"vm_memory_high_watermark.absolute = 1GB",
		"disk_free_limit.absolute = 50MB",
		"collect_statistics_interval = 1000",
		"log.console = true",
		"log.console.level = warning",
		"loopback_users = none",
	}, r.extra...)
	return strings.Join(lines, "\n") + "\n"
}

// startMapper runs epmd in the foreground. The epmd that a node starts detaches, and would outlive the node.
func (r *rabbitmq) startMapper(ctx context.Context) error {
	cmd := exec.Command(r.epmd, "-address", r.host.address(), "-port", strconv.Itoa(r.epmdPort))
	cmd.Dir = r.dir
	var err error
	if r.mapper, err = startProcess(cmd, r.host.Enter); err != nil {
		return fmt.Errorf("epmd: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, Patience)
	defer cancel()
	for {
		conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", r.host.at(r.epmdPort))
		if err == nil {
			return conn.Close()
		}
		select {
		case <-r.mapper.done:
			return fmt.Errorf("epmd ended (%s), its port may be in use", r.mapper.verdict())
		case <-ctx.Done():
			return fmt.Errorf("epmd does not answer: %w", err)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func (r *rabbitmq) command() *exec.Cmd {
	cmd := exec.Command(r.script)
	cmd.Dir, cmd.Env = r.dir, r.environment()
	return cmd
}

// control returns a command for the rabbitmqctl next to the server's script.
func (r *rabbitmq) control(ctx context.Context, args []string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, filepath.Join(filepath.Dir(r.script), "rabbitmqctl"), args...)
	cmd.Dir, cmd.Env = r.dir, r.environment()
	return cmd
}

func (r *rabbitmq) environment() []string {
	in := func(name string) string { return filepath.Join(r.dir, name) }
	return append(environWithout("RABBITMQ_", "ERL_", "NOTIFY_SOCKET"),
		"HOME="+r.dir,
		"RABBITMQ_NODENAME="+r.node(),
		"RABBITMQ_USE_LONGNAME="+strconv.FormatBool(r.host.apart()),
		"RABBITMQ_CONF_ENV_FILE="+in("env.conf"),
		"RABBITMQ_CONFIG_FILE="+in("rabbitmq.conf"),
		"RABBITMQ_ADVANCED_CONFIG_FILE="+in("advanced.config"),
		"RABBITMQ_ENABLED_PLUGINS_FILE="+in("enabled_plugins"),
		"RABBITMQ_MNESIA_BASE="+in("mnesia"),
		"RABBITMQ_LOG_BASE="+in("log"),
		"RABBITMQ_LOGS=-",
		"RABBITMQ_PID_FILE="+in("pid"),
		"RABBITMQ_GENERATED_CONFIG_DIR="+in("generated"),
		fmt.Sprintf("RABBITMQ_DIST_PORT=%d", r.distPort),
		fmt.Sprintf("ERL_EPMD_PORT=%d", r.epmdPort),
		"ERL_EPMD_ADDRESS="+r.host.address(),
		// The node listens for other nodes on the loopback only. Idle schedulers sleep instead of spinning.
		"RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS=-kernel inet_dist_use_interface "+r.host.tuple()+" +sbwt none +sbwtdcpu none +sbwtdio none",
		// As under systemd, the script execs the server instead of waiting for it.
		"RUNNING_UNDER_SYSTEMD=true",
	)
}

// node is the name of the node. A node of a cluster has its address in its name.
func (r *rabbitmq) node() string {
	if r.host.apart() {
		return "holdfast@" + r.host.address()
	}
	return "holdfast@localhost"
}

// environWithout returns this process's environment without the variables with these prefixes.
func environWithout(prefixes ...string) []string {
	var kept []string
	for _, variable := range os.Environ() {
		drop := false
		for _, prefix := range prefixes {
			drop = drop || strings.HasPrefix(variable, prefix)
		}
		if !drop {
			kept = append(kept, variable)
		}
	}
	return kept
}

func pingRabbitMQ(ctx context.Context, url string) error {
	conn, err := amqp.DialConfig(url, amqp.Config{Dial: func(network, addr string) (net.Conn, error) {
		c, err := (&net.Dialer{}).DialContext(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		if deadline, ok := ctx.Deadline(); ok { // a server may accept and never answer
			err = c.SetDeadline(deadline)
		}
		return c, err
	}})
	if err != nil {
		return err
	}
	return conn.Close()
}

func pingManagement(ctx context.Context, adminURL string) error {
	return Admin(ctx, adminURL, http.MethodGet, "/api/overview", nil, nil)
}

func (r *rabbitmq) stopSignal() syscall.Signal { return syscall.SIGTERM }

func (r *rabbitmq) url() string { return fmt.Sprintf("amqp://guest:guest@%s/", r.host.at(r.port)) }

func (r *rabbitmq) adminURL() string {
	return fmt.Sprintf("http://guest:guest@%s", r.host.at(r.adminPort))
}

func (r *rabbitmq) close() error {
	if r.mapper == nil {
		return nil
	}
	return r.mapper.kill()
}

// longestAnswer bounds an answer of the management API, in bytes.
const longestAnswer = 16 << 20

// Admin calls RabbitMQ's management API. adminURL comes from Server.AdminURL or AMQPAdminURL, path starts with /api/.
// in is sent as JSON, and the answer is decoded into out; nil means none. A status other than 2xx is an error. A call
// takes at most Patience, and keeps no connection open.
func Admin(ctx context.Context, adminURL, method, path string, in, out any) error {
	ctx, cancel := context.WithTimeout(ctx, Patience)
	defer cancel()
	var body io.Reader
	if in != nil {
		text, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(text)
	}
	req, err := http.NewRequestWithContext(ctx, method, strings.TrimSuffix(adminURL, "/")+path, body)
	if err != nil {
		return err
	}
	req.Close = true
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, longestAnswer))
	if err != nil {
		return err
	}
	if resp.StatusCode < http.StatusOK || resp.StatusCode >= http.StatusMultipleChoices {
		return fmt.Errorf("testenv: management API: %s %s: %s: %s", method, path, resp.Status, bytes.TrimSpace(text))
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(text, out)
}

// AddVHost creates an empty virtual host. The user in adminURL may use it.
func AddVHost(ctx context.Context, adminURL, name string) error {
	return Admin(ctx, adminURL, http.MethodPut, "/api/vhosts/"+name, struct{}{}, nil)
}

// RemoveVHost deletes a virtual host with its queues and connections.
func RemoveVHost(ctx context.Context, adminURL, name string) error {
	return Admin(ctx, adminURL, http.MethodDelete, "/api/vhosts/"+name, nil, nil)
}
