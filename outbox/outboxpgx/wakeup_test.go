package outboxpgx_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
)

// background runs fn until the test ends, or stop is called.
func background(t *testing.T, fn func(context.Context) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- fn(ctx) }()
	var once atomic.Bool
	stop = func() {
		cancel()
		if once.CompareAndSwap(false, true) {
			if err := <-ended; err != nil {
				t.Errorf("Run returned %v", err)
			}
		}
	}
	t.Cleanup(stop)
	return stop
}

func listener(t *testing.T, pool *pgxpool.Pool, wake func(), cfg outboxpgx.ListenerConfig) *outboxpgx.Listener {
	t.Helper()
	cfg.Logger = quiet
	l, err := outboxpgx.NewListener(pool, wake, cfg)
	must(t, err)
	background(t, l.Run)
	return l
}

func notifier(t *testing.T, pool *pgxpool.Pool, cfg outboxpgx.NotifierConfig) *outboxpgx.Notifier {
	t.Helper()
	cfg.Logger = quiet
	n, err := outboxpgx.NewNotifier(pool, cfg)
	must(t, err)
	background(t, n.Run)
	return n
}

func untilReady(t *testing.T, l *outboxpgx.Listener) {
	t.Helper()
	testenv.Eventually(t, testenv.Patience, func() error { return l.Ready(t.Context()) })
}

func TestNotifierWakesTheRelayOfAnotherProcess(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.SourceConfig{})
	publisher := outboxtest.NewPublisher()
	relay := f.relay(t, publisher, outbox.RelayConfig{PollInterval: time.Hour})
	defer run(t, relay)()
	untilReady(t, listener(t, f.pool, relay.Wake, outboxpgx.ListenerConfig{}))
	writer, err := outboxpgx.NewWriter(outboxpgx.WriterConfig{OnCommit: notifier(t, f.pool, outboxpgx.NotifierConfig{}).Notify})
	must(t, err)
	for n := 1; n <= 20; n++ {
		must(t, f.manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
			return writer.Write(ctx, tx, outbox.Message{Name: "a", Body: []byte("1")})
		}))
		testenv.Eventually(t, testenv.Patience, func() error {
			if got := len(publisher.Received()); got != n {
				return fmt.Errorf("%d of %d received", got, n)
			}
			return nil
		})
	}
}

func TestNotificationsAreFew(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.SourceConfig{})
	other := setup(t, outboxpgx.SourceConfig{})
	var woken, elsewhere atomic.Int64
	untilReady(t, listener(t, f.pool, func() { woken.Add(1) }, outboxpgx.ListenerConfig{}))
	untilReady(t, listener(t, other.pool, func() { elsewhere.Add(1) }, outboxpgx.ListenerConfig{}))
	before := woken.Load() // it wakes the relay once when it has connected
	n, err := outboxpgx.NewNotifier(f.pool, outboxpgx.NotifierConfig{Interval: time.Hour, Logger: quiet})
	must(t, err)
	for range 1000 {
		n.Notify()
	}
	stop := background(t, n.Run)
	testenv.Eventually(t, testenv.Patience, func() error {
		if woken.Load() == before {
			return errors.New("not woken up")
		}
		return nil
	})
	n.Notify() // within the interval: sent when Run ends
	stop()
	testenv.Eventually(t, testenv.Patience, func() error {
		if got := woken.Load() - before; got != 2 {
			return fmt.Errorf("woken up %d times for two notifications", got)
		}
		return nil
	})
	if got := elsewhere.Load(); got != 1 {
		t.Errorf("the listener of another outbox was woken up %d times", got-1)
	}
}

func TestListenerReconnects(t *testing.T) {
	t.Parallel()
	direct := pgtest.New(t)
	proxy := testenv.NewProxy(t, direct.Config().ConnString())
	f := setupOn(t, direct, outboxpgx.SourceConfig{})
	var woken atomic.Int64
	l := listener(t, pgtest.Pool(t, proxy.URL(), 5), func() { woken.Add(1) }, outboxpgx.ListenerConfig{ProbeInterval: 100 * time.Millisecond})
	n := notifier(t, f.pool, outboxpgx.NotifierConfig{})
	untilReady(t, l)
	for _, outage := range []func(){proxy.Cut, proxy.Pause} {
		outage()
		testenv.Eventually(t, testenv.Patience, func() error {
			if l.Ready(t.Context()) == nil {
				return errors.New("it has not noticed the outage")
			}
			return nil
		})
		proxy.Heal()
		untilReady(t, l)
		before := woken.Load()
		n.Notify()
		testenv.Eventually(t, testenv.Patience, func() error {
			if woken.Load() == before {
				return errors.New("not woken up")
			}
			return nil
		})
	}
}

func TestNotifierOutlivesAnOutage(t *testing.T) {
	t.Parallel()
	direct := pgtest.New(t)
	proxy := testenv.NewProxy(t, direct.Config().ConnString())
	setupOn(t, direct, outboxpgx.SourceConfig{})
	var woken atomic.Int64
	untilReady(t, listener(t, direct, func() { woken.Add(1) }, outboxpgx.ListenerConfig{}))
	before := woken.Load()
	proxy.Cut()
	warned := make(chan struct{}, 100)
	n, err := outboxpgx.NewNotifier(pgtest.Pool(t, proxy.URL(), 2), outboxpgx.NotifierConfig{Logger: slog.New(slog.NewTextHandler(signal(warned), nil))})
	must(t, err)
	background(t, n.Run)
	n.Notify()
	<-warned
	proxy.Heal()
	testenv.Eventually(t, testenv.Patience, func() error {
		if woken.Load() == before {
			return errors.New("the notification of the outage is not made good")
		}
		return nil
	})
}

func TestSwallowedNotificationsAreReported(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.SourceConfig{})
	whole, err := outboxpgx.NewListener(f.pool, func() {}, outboxpgx.ListenerConfig{})
	must(t, err)
	if findings, err := whole.Check(t.Context()); err != nil || len(findings) > 0 {
		t.Errorf("a direct connection: %v, %v", findings, err)
	}
	l := listener(t, pgtest.Pool(t, swallow(t, f.pool.Config().ConnString()), 5), func() {}, outboxpgx.ListenerConfig{})
	findings, err := l.Check(t.Context())
	must(t, err)
	if len(findings) != 1 {
		t.Errorf("findings %v, want one about the notifications", findings)
	}
	if l.Ready(t.Context()) == nil {
		t.Error("the listener is ready, and hears nothing")
	}
	early, err := outboxpgx.NewListener(f.pool, func() {}, outboxpgx.ListenerConfig{Table: "not_there_yet"})
	must(t, err)
	if findings, err := early.Check(t.Context()); err != nil || len(findings) != 1 || !strings.Contains(findings[0].Mend, "Migrate") {
		t.Errorf("without a table: %v, %v", findings, err)
	}
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := l.Check(cancelled); err == nil {
		t.Error("a check that could not look found nothing wrong")
	}
}

// swallow returns the address of what a pooler in transaction mode is to a listener: everything
// passes but notifications.
func swallow(t *testing.T, rawURL string) string {
	t.Helper()
	cfg, err := pgconn.ParseConfig(rawURL)
	must(t, err)
	door, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { door.Close() })
	go func() {
		for {
			client, err := door.Accept()
			if err != nil {
				return
			}
			network, address := pgconn.NetworkAddress(cfg.Host, cfg.Port)
			server, err := net.Dial(network, address)
			if err != nil {
				client.Close()
				continue
			}
			go func() { _, _ = io.Copy(server, client); server.Close() }()
			go func() { passReplies(client, server); client.Close() }()
		}
	}()
	u, err := url.Parse(rawURL)
	must(t, err)
	u.Host = door.Addr().String()
	query := u.Query()
	query.Del("host")
	query.Set("sslmode", "disable")
	u.RawQuery = query.Encode()
	return u.String()
}

func passReplies(client io.Writer, server io.Reader) {
	const notification = 'A'
	head := make([]byte, 5)
	for {
		if _, err := io.ReadFull(server, head); err != nil {
			return
		}
		to := client
		if head[0] == notification {
			to = io.Discard
		}
		if _, err := to.Write(append([]byte{}, head...)); err != nil {
			return
		}
		if _, err := io.CopyN(to, server, int64(binary.BigEndian.Uint32(head[1:]))-4); err != nil {
			return
		}
	}
}

func TestWakeUpRefuses(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	for name, err := range map[string]error{
		"no pool":        second(outboxpgx.NewNotifier(nil, outboxpgx.NotifierConfig{})),
		"interval":       second(outboxpgx.NewNotifier(pool, outboxpgx.NotifierConfig{Interval: -1})),
		"table":          second(outboxpgx.NewNotifier(pool, outboxpgx.NotifierConfig{Table: "a b"})),
		"no wake":        second(outboxpgx.NewListener(pool, nil, outboxpgx.ListenerConfig{})),
		"probe interval": second(outboxpgx.NewListener(pool, func() {}, outboxpgx.ListenerConfig{ProbeInterval: -1})),
	} {
		if err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

// signal is an io.Writer that tells of every write.
type signal chan struct{}

func (s signal) Write(p []byte) (int, error) {
	select {
	case s <- struct{}{}:
	default:
	}
	return len(p), nil
}

func second[T any](_ T, err error) error { return err }
