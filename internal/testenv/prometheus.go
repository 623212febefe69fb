package testenv

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

// prometheus is an instance of Prometheus.
type prometheus struct {
	bin    string
	dir    string
	port   int
	config string
}

// newPrometheus takes the lines of prometheus.yml.
func newPrometheus(extra []string) (engine, error) {
	bin, err := findPrometheus()
	if err != nil {
		return nil, err
	}
	port, err := FreePort()
	if err != nil {
		return nil, err
	}
	return &prometheus{bin: bin, port: port, config: strings.Join(extra, "\n") + "\n"}, nil
}

func (p *prometheus) prepare(_ context.Context, dir string) error {
	p.dir = dir
	return os.WriteFile(p.file(), []byte(p.config), 0o600)
}

func (p *prometheus) command() *exec.Cmd {
	cmd := exec.Command(p.bin,
		"--config.file="+p.file(),
		"--storage.tsdb.path="+filepath.Join(p.dir, "data"),
		fmt.Sprintf("--web.listen-address=127.0.0.1:%d", p.port))
	cmd.Dir = p.dir
	return cmd
}

// pingPrometheus asks whether the server has read its configuration and answers queries.
func pingPrometheus(ctx context.Context, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/-/ready", nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, 4096)) // for the next request on this connection
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("Prometheus answers %s", resp.Status)
	}
	return nil
}

func (p *prometheus) stopSignal() syscall.Signal { return syscall.SIGTERM }
func (p *prometheus) url() string                { return fmt.Sprintf("http://127.0.0.1:%d", p.port) }
func (p *prometheus) adminURL() string           { return "" }
func (p *prometheus) close() error               { return nil }
func (p *prometheus) file() string               { return filepath.Join(p.dir, "prometheus.yml") }
