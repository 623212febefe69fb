package testenv

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

// natsConfig allows the largest body that consumers take, 16 MiB, with its headers.
const natsConfig = `listen: %s
max_payload: 33554432
jetstream { store_dir: %q }
`

// natsServer is an instance of nats-server with JetStream, which keeps its data on disk.
type natsServer struct {
	bin  string
	dir  string
	port int
	spec Spec
}

// newNATS takes lines of the server's configuration.
func newNATS(spec Spec) (engine, error) {
	bin, err := findNATS()
	if err != nil {
		return nil, err
	}
	port, err := FreePort()
	if err != nil {
		return nil, err
	}
	return &natsServer{bin: bin, port: port, spec: spec}, nil
}

func (n *natsServer) file() string { return filepath.Join(n.dir, "nats.conf") }

func (n *natsServer) prepare(_ context.Context, dir string) error {
	n.dir = dir
	text := fmt.Sprintf(natsConfig, n.spec.Host.at(n.port), filepath.Join(dir, "data")) + strings.Join(n.spec.Extra, "\n") + "\n"
	return os.WriteFile(n.file(), []byte(text), 0o600)
}

func (n *natsServer) command() *exec.Cmd {
	cmd := exec.Command(n.bin, "--config", n.file())
	cmd.Dir = n.dir
	return cmd
}

// pingNATS asks in the server's own protocol, for which this package needs no client: whether JetStream is on, and
// whether clients are answered.
func pingNATS(ctx context.Context, url string) error {
	host := strings.TrimPrefix(url, "nats://")
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", host[strings.LastIndex(host, "@")+1:])
	if err != nil {
		return err
	}
	defer conn.Close()
	if deadline, ok := ctx.Deadline(); ok {
		if err := conn.SetDeadline(deadline); err != nil {
			return err
		}
	}
	in := bufio.NewReader(conn)
	info, err := in.ReadString('\n')
	if err != nil {
		return err
	}
	if !strings.Contains(info, `"jetstream":true`) {
		return errors.New("testenv: nats-server runs without JetStream")
	}
	if _, err := conn.Write([]byte("CONNECT {\"verbose\":false}\r\nPING\r\n")); err != nil {
		return err
	}
	answer, err := in.ReadString('\n')
	if err == nil && strings.TrimSpace(answer) != "PONG" {
		err = fmt.Errorf("testenv: nats-server answers %s", strings.TrimSpace(answer))
	}
	return err
}

func (n *natsServer) stopSignal() syscall.Signal { return syscall.SIGTERM }
func (n *natsServer) url() string                { return "nats://" + n.spec.Host.at(n.port) }
func (n *natsServer) adminURL() string           { return "" }
func (n *natsServer) close() error               { return nil }
