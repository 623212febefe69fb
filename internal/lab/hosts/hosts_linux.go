// Package hosts divides one machine into hosts: network namespaces, each with an address, joined by a bridge.
// It needs root and a process in its own network namespace. Everything that it makes ends with that namespace:
//
//	unshare --net --mount …
package hosts

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

const (
	bridge = "hosts"
	// prefix starts all addresses. This process has the last one.
	prefix = "10.77.0."
	last   = 254
)

// Network joins hosts. Use it from one goroutine only.
type Network struct {
	hosts []*Host
}

// Host is one host of a Network.
type Host struct {
	testenv.Host
	Name string
	net  *Network
}

// Open makes a network without hosts. This process belongs to it.
func Open(ctx context.Context) (*Network, error) {
	return &Network{}, all(ctx,
		"link set lo up",
		"link add "+bridge+" type bridge",
		fmt.Sprintf("addr add %s%d/24 dev %s", prefix, last, bridge),
		"link set "+bridge+" up",
	)
}

// Add makes a host. The name may have at most ten letters.
func (n *Network) Add(ctx context.Context, name string) (*Host, error) {
	h := &Host{Name: name, net: n}
	h.Address = fmt.Sprint(prefix, len(n.hosts)+1)
	h.Enter = h.enter
	err := all(ctx,
		"netns add "+name,
		fmt.Sprintf("link add %s type veth peer name eth0 netns %s", h.port(), name),
		fmt.Sprintf("link set %s master %s up", h.port(), bridge),
		"-n "+name+" link set lo up",
		"-n "+name+" link set eth0 up",
		fmt.Sprintf("-n %s addr add %s/24 dev eth0", name, h.Address),
	)
	n.hosts = append(n.hosts, h)
	return h, err
}

// port is the name of the host's end on the bridge.
func (h *Host) port() string { return "to-" + h.Name }

// Cut unplugs the host from the network.
func (h *Host) Cut(ctx context.Context) error { return all(ctx, "link set "+h.port()+" down") }

// Heal plugs the host in again.
func (h *Host) Heal(ctx context.Context) error { return all(ctx, "link set "+h.port()+" up") }

// CutFrom silently drops the packets between this host and others. They still reach all other hosts.
func (h *Host) CutFrom(ctx context.Context, others ...*Host) error {
	return h.routes(ctx, "add", others)
}

// HealTo ends CutFrom.
func (h *Host) HealTo(ctx context.Context, others ...*Host) error {
	return h.routes(ctx, "del", others)
}

func (h *Host) routes(ctx context.Context, do string, others []*Host) error {
	for _, o := range others {
		err := all(ctx,
			fmt.Sprintf("-n %s route %s blackhole %s/32", h.Name, do, o.Address),
			fmt.Sprintf("-n %s route %s blackhole %s/32", o.Name, do, h.Address))
		if err != nil {
			return err
		}
	}
	return nil
}

// Take gives the host one more address, which may have belonged to another host.
func (h *Host) Take(ctx context.Context, address string) error {
	if err := all(ctx, fmt.Sprintf("-n %s addr add %s/24 dev eth0", h.Name, address)); err != nil {
		return err
	}
	forget := "neigh flush to " + address // drop the old owner's MAC address
	if err := all(ctx, forget); err != nil {
		return err
	}
	for _, o := range h.net.hosts {
		if err := all(ctx, "-n "+o.Name+" "+forget); err != nil {
			return err
		}
	}
	return nil
}

// Drop ends Take.
func (h *Host) Drop(ctx context.Context, address string) error {
	return all(ctx, fmt.Sprintf("-n %s addr del %s/24 dev eth0", h.Name, address))
}

// Shared returns an address that belongs to no host by default.
func (n *Network) Shared(i int) string { return fmt.Sprint(prefix, 100+i) }

// enter moves this thread into the host's namespace.
func (h *Host) enter() error {
	namespace, err := os.Open("/run/netns/" + h.Name)
	if err != nil {
		return err
	}
	defer namespace.Close()
	if err := unix.Setns(int(namespace.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("hosts: enter %s: %w", h.Name, err)
	}
	return nil
}

// Start starts a command on the host. The starting thread lives until the command has ended, because the
// command may die with it, depending on its SysProcAttr. ended gets the result of Wait.
func (h *Host) Start(cmd *exec.Cmd) (ended <-chan error, err error) {
	started, done := make(chan error, 1), make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread is now in another network
		err := h.enter()
		if err == nil {
			err = cmd.Start()
		}
		started <- err
		if err == nil {
			done <- cmd.Wait()
		}
	}()
	return done, <-started
}

func all(ctx context.Context, commands ...string) error {
	for _, c := range commands {
		if out, err := exec.CommandContext(ctx, "ip", strings.Fields(c)...).CombinedOutput(); err != nil {
			return fmt.Errorf("hosts: ip %s: %w: %s", c, err, out)
		}
	}
	return nil
}
