package outboxkafka_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/modules/kafka/internal/kafkatest"
	"github.com/holdfast-go/holdfast/modules/kafka/outboxkafka"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// restartable is a fake cluster that keeps its data and addresses when it is restarted.
type restartable struct {
	*kfake.Cluster

	dir   string
	addrs []string
}

func newRestartable(t *testing.T, topic string) *restartable {
	t.Helper()
	r := &restartable{dir: t.TempDir()}
	r.Cluster = kafkatest.Fake(t, kfake.NumBrokers(2), kfake.SeedTopics(3, topic), kfake.DataDir(r.dir))
	r.addrs = r.ListenAddrs()
	t.Cleanup(func() { r.Close() }) // the cluster of that time
	return r
}

func (r *restartable) restart(t *testing.T) {
	t.Helper()
	r.Close()
	var ports []int
	for _, addr := range r.addrs {
		_, text, err := net.SplitHostPort(addr)
		must(t, err)
		port, err := strconv.Atoi(text)
		must(t, err)
		ports = append(ports, port)
	}
	testenv.Eventually(t, func() (err error) { // the ports become free
		r.Cluster, err = kfake.NewCluster(kfake.NumBrokers(len(ports)), kfake.Ports(ports...), kfake.DataDir(r.dir))
		return err
	})
}

// While a relay publishes, the cluster is restarted, connections break, and replies are lost. Every message arrives, and
// no message of a key comes after a later one.
func TestRelay_keepsOrderThroughFaults(t *testing.T) {
	t.Parallel()
	const keys, perRound = 5, 10
	rounds := 3 + testenv.Rounds(t)
	cluster, line := newRestartable(t, "shop"), &kafkatest.Line{}
	store, manager := outboxtest.New(), txretrytest.New(txretrytest.Config{})
	p := newPublisher(t, kafkatest.Client(t, cluster.addrs, kgo.Dialer(line.Dial)), outboxkafka.Config{Topic: "shop"})
	relay, err := outbox.NewRelay(store, p, outbox.RelayConfig{
		PublishTimeout: 500 * time.Millisecond, PollInterval: 10 * time.Millisecond, BatchSize: 20, Logger: slog.New(slog.DiscardHandler),
	})
	must(t, err)
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- relay.Run(ctx) }()
	defer func() {
		stop()
		must(t, <-ended)
	}()
	for round := range rounds {
		must(t, manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
			for i := range keys * perRound {
				m, err := outbox.NewMessage("order.changed", round*perRound+i/keys)
				if err != nil {
					return err
				}
				m.Key = fmt.Sprint("order-", i%keys)
				if err := store.Write(ctx, tx, m); err != nil {
					return err
				}
			}
			return nil
		}))
		switch round % 3 {
		case 0:
			cluster.restart(t)
		case 1:
			line.Cut()
			time.Sleep(600 * time.Millisecond) // timing: longer than PublishTimeout, so that the relay gives messages up
			line.Heal()
		case 2:
			cluster.Fault(
				kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Err: kerr.RequestTimedOut, Count: 10},
				kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Err: kerr.NotLeaderForPartition, Count: 3},
			)
		}
	}
	testenv.Eventually(t, func() error {
		depth, err := store.Depth(t.Context())
		if err == nil && depth.Ready+depth.Parked+depth.Dead > 0 {
			err = fmt.Errorf("%d messages are ready, %d wait, %d are dead", depth.Ready, depth.Parked, depth.Dead)
		}
		return err
	})
	last, copies := map[string]int{}, 0
	reader := kafkatest.NewReader(t, cluster.addrs, "shop")
	arrived(t, reader, rounds*keys*perRound)
	for _, r := range reader.Records(t.Context()) {
		n, err := strconv.Atoi(string(r.Value))
		must(t, err)
		switch want := last[string(r.Key)]; {
		case n == want:
			last[string(r.Key)]++
		case n < want-1:
			t.Errorf("key %s: message %d came again after message %d", r.Key, n, want-1)
		case n > want:
			t.Fatalf("key %s: message %d came before message %d", r.Key, n, want)
		default:
			copies++
		}
	}
	for i := range keys {
		if n := last[fmt.Sprint("order-", i)]; n != rounds*perRound {
			t.Errorf("key %d has %d messages, want %d", i, n, rounds*perRound)
		}
	}
	t.Logf("%d copies", copies)
}
