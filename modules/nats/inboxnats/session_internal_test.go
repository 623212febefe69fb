package inboxnats

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/modules/nats/internal/natstest"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// newTestConsumer returns a consumer called billing, after Setup.
func newTestConsumer(t *testing.T, conn *nats.Conn, from Stream, cfg inbox.ConsumerConfig) *Consumer {
	t.Helper()
	cfg.Name, cfg.Logger = "billing", slog.New(slog.DiscardHandler)
	consumer, err := NewConsumer(conn, from, inbox.NewMux(), cfg)
	must(t, err)
	must(t, consumer.Setup(t.Context()))
	return consumer
}

// open starts a session of a source.
func open(t *testing.T, s *source, window int) *session {
	t.Helper()
	opened, err := s.Open(t.Context())
	must(t, err)
	must(t, opened.Start(t.Context(), window))
	t.Cleanup(func() { _ = opened.Close(context.WithoutCancel(t.Context())) })
	return opened.(*session)
}

// renew runs a source until the test ends, so that its sessions keep their leases.
func renew(t *testing.T, s *source) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var running sync.WaitGroup
	running.Go(func() { s.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
}

// newDurable creates a stream with a durable consumer called billing, which Setup leaves as it is.
func newDurable(t *testing.T, conn *nats.Conn, name string, cfg jetstream.ConsumerConfig) jetstream.Consumer {
	t.Helper()
	js := natstest.JetStream(t, conn)
	_, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: name, Subjects: []string{name + ".>"}})
	must(t, err)
	cfg.Durable, cfg.FilterSubject, cfg.AckPolicy, cfg.MaxAckPending = "billing", name+".>", jetstream.AckExplicitPolicy, -1
	durable, err := js.CreateConsumer(t.Context(), name, cfg)
	must(t, err)
	return durable
}

// publish publishes n messages. The server numbers them.
func publish(t *testing.T, conn *nats.Conn, stream string, n int) {
	t.Helper()
	for range n {
		_, err := natstest.JetStream(t, conn).Publish(t.Context(), stream+".order.placed", nil)
		must(t, err)
	}
}

// numbers receives n messages, and returns their numbers.
func numbers(t *testing.T, s *session, n int) (all []uint64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
	defer cancel()
	for len(all) < n {
		ds, err := s.Receive(ctx, n-len(all))
		must(t, err)
		for _, d := range ds {
			all = append(all, d.(*delivery).seq)
		}
	}
	return all
}

// The previous owner has died, and its signs of life arrive late: the server redelivers its message after more than the ack
// wait. The new owner hands it out first, and holds few of the many that wait.
func TestTakeOver_lateSignsOfLife(t *testing.T) {
	t.Parallel()
	conn := natstest.New(t)
	name := natstest.Name(t, conn)
	durable := newDurable(t, conn, name, jetstream.ConsumerConfig{AckWait: 2 * time.Second})
	source := newOrdered(t, conn, name, Stream{})
	renew(t, source)
	publish(t, conn, name, 100)
	held, err := durable.Next() // of the previous owner
	must(t, err)
	alive, dead := context.WithTimeout(t.Context(), 3*time.Second) // timing: more than the ack wait
	defer dead()
	go func() {
		for alive.Err() == nil {
			_ = held.InProgress()
			time.Sleep(100 * time.Millisecond)
		}
	}()
	s := open(t, source, 5)
	received := numbers(t, s, 1)
	s.hand.mu.Lock()
	most := len(s.hand.all)
	s.hand.mu.Unlock()
	if received[0] != 1 {
		t.Errorf("received %d first", received[0])
	}
	if most > 50 {
		t.Errorf("the new owner holds %d messages", most)
	}
	if rest := numbers(t, s, 4); fmt.Sprint(rest) != "[2 3 4 5]" {
		t.Errorf("received %v next", rest)
	}
}

// Of two messages of the previous owner one is acknowledged late, and never redelivered. The new owner counts again, and
// does not wait for it until the ack wait of an hour is over.
func TestTakeOver_countsAgain(t *testing.T) {
	t.Parallel()
	conn := natstest.New(t)
	name := natstest.Name(t, conn)
	durable := newDurable(t, conn, name, jetstream.ConsumerConfig{AckWait: time.Hour})
	source := newOrdered(t, conn, name, Stream{})
	renew(t, source)
	publish(t, conn, name, 3)
	held, err := durable.Fetch(2)
	must(t, err)
	var all []jetstream.Msg
	for m := range held.Messages() {
		all = append(all, m)
	}
	s := open(t, source, 5)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond) // timing: nothing must arrive in it
	defer cancel()
	if ds, err := s.Receive(ctx, 5); len(ds) > 0 || ctx.Err() == nil {
		t.Fatalf("received %d messages before the previous owner's, error %v", len(ds), err)
	}
	must(t, all[0].DoubleAck(t.Context()))
	must(t, all[1].Nak())
	if received := numbers(t, s, 2); fmt.Sprint(received) != "[2 3]" {
		t.Errorf("received %v", received)
	}
}

// A session could not requeue a message. The next owner waits for its redelivery, also if the connection came back before
// the session closed.
func TestClose_afterFailedRequeue(t *testing.T) {
	t.Parallel()
	conn := natstest.New(t)
	name := natstest.Name(t, conn)
	source := newOrdered(t, conn, name, Stream{})
	renew(t, source)
	publish(t, conn, name, 2)
	s := open(t, source, 1)
	ds, err := s.Receive(t.Context(), 1)
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.GiveBack(ctx, ds); err == nil {
		t.Error("a requeue without time succeeds")
	}
	must(t, s.Close(t.Context()))
	first := ds[0].(*delivery).seq
	if received := numbers(t, open(t, source, 2), 2); fmt.Sprint(received) != fmt.Sprint([]uint64{first, first + 1}) {
		t.Errorf("the next owner received %v, want %d first", received, first)
	}
}

// Receive finds a lock held if it wakes during a requeue. It wakes again after the requeue, so the next request does not
// wait for pullPause.
func TestGiveBack_wakesReceiveAfterwards(t *testing.T) {
	t.Parallel()
	conn := natstest.New(t)
	name := natstest.Name(t, conn)
	consumer := newTestConsumer(t, conn, Stream{Name: name}, inbox.ConsumerConfig{})
	publish(t, conn, name, 1)
	s := open(t, consumer.parts[0], 1)
	ds, err := s.Receive(t.Context(), 1)
	must(t, err)
	for len(s.hand.changed) > 0 {
		<-s.hand.changed // of the delivery
	}
	free := make(chan struct{})
	go func() {
		for range s.hand.changed {
			if s.asking.TryLock() {
				s.asking.Unlock()
				close(free)
				return
			}
		}
	}()
	must(t, s.GiveBack(t.Context(), ds))
	select {
	case <-free:
	case <-time.After(testenv.Patience):
		t.Error("Receive is not woken after a requeue")
		s.hand.wake()
	}
}

// The durable consumer was there before, and does not allow large requests: the session reports that.
func TestReceive_rejectedRequest(t *testing.T) {
	t.Parallel()
	conn := natstest.New(t)
	name := natstest.Name(t, conn)
	newDurable(t, conn, name, jetstream.ConsumerConfig{MaxRequestBatch: 5})
	consumer := newTestConsumer(t, conn, Stream{Name: name}, inbox.ConsumerConfig{})
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
	defer cancel()
	if _, err := open(t, consumer.parts[0], 6).Receive(ctx, 6); err == nil || !strings.Contains(err.Error(), "MaxRequestBatch") {
		t.Errorf("error %v", err)
	}
	if err := consumer.Check(t.Context()); err == nil || !strings.Contains(err.Error(), "remove max_batch") {
		t.Errorf("Check found %v", err)
	}
}

// No stream takes the dead letters of a move. The source asks once whether the server works, because it may be silent.
func TestMove_asksOnce(t *testing.T) {
	t.Parallel()
	conn := natstest.New(t)
	name := natstest.Name(t, conn)
	s := newTestConsumer(t, conn, Stream{Name: name}, inbox.ConsumerConfig{}).parts[0]
	publish(t, conn, name, 3)
	opened := open(t, s, 3)
	var moves []driver.Move
	for len(moves) < 3 {
		ds, err := opened.Receive(t.Context(), 3)
		must(t, err)
		for _, d := range ds {
			moves = append(moves, driver.Move{Delivery: d, Target: driver.ToDead})
		}
	}
	must(t, natstest.JetStream(t, conn).DeleteStream(t.Context(), s.dead))
	asked, err := conn.SubscribeSync("$JS.API.STREAM.INFO." + s.retries)
	must(t, err)
	s.running.Store(true)
	for _, err := range s.Move(t.Context(), moves) {
		if !errors.Is(err, driver.ErrRefused) {
			t.Errorf("error %v, want ErrRefused", err)
		}
	}
	must(t, conn.Flush())
	if n, _, err := asked.Pending(); n != 1 || err != nil {
		t.Errorf("it asked %d times, error %v", n, err)
	}
}

// A process was paused for longer than its lease. Another one may own the stream, so what the process has is not handed
// out.
func TestReceive_afterLease(t *testing.T) {
	t.Parallel()
	conn := natstest.New(t)
	name := natstest.Name(t, conn)
	source := newOrdered(t, conn, name, Stream{})
	publish(t, conn, name, 2)
	s := open(t, source, 2)
	numbers(t, s, 1)
	testenv.Eventually(t, func() error {
		s.hand.mu.Lock()
		defer s.hand.mu.Unlock()
		if len(s.hand.spare) == 0 {
			return driver.ErrUnavailable
		}
		return nil
	})
	s.lease.mu.Lock()
	s.lease.until = time.Now()
	s.lease.mu.Unlock()
	if ds, err := s.Receive(t.Context(), 1); err == nil {
		t.Errorf("received %d messages without the lease", len(ds))
	}
}

// A server falls silent while an ordered session works and renews its lease. Its calls end in time.
func TestSession_silentServer(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "waits for timeouts")
	for name, test := range map[string]struct {
		most time.Duration
		call func(ctx context.Context, s *session)
	}{
		"Run ends":     {2 * time.Second, func(ctx context.Context, s *session) { s.renew(ctx) }},
		"Receive ends": {time.Second, func(ctx context.Context, s *session) { _ = s.lease.write(ctx, 0, s.name) }},
		"Close": {8 * time.Second, func(ctx context.Context, s *session) {
			renewed := make(chan struct{})
			go func() {
				s.renew(context.WithoutCancel(ctx))
				close(renewed)
			}()
			<-ctx.Done()
			_ = s.Close(ctx)
			<-renewed
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := testenv.NATSURL(t)
			direct, network := natstest.Connect(t, url), testenv.NewProxy(t, url)
			name := natstest.Name(t, direct)
			s := open(t, newOrdered(t, natstest.Connect(t, network.URL()), name, Stream{}), 1)
			publish(t, direct, name, 1)
			numbers(t, s, 1)
			network.Pause()
			defer network.Resume()
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			began := time.Now()
			test.call(ctx, s)
			if took := time.Since(began) - time.Second; took > test.most {
				t.Errorf("the call took %v longer than its context, want at most %v", took, test.most)
			}
		})
	}
}

// Connections are lost while messages are acknowledged. The server has read each acknowledgement that Ack reports, and
// redelivers none of those messages. With a small buffer the client writes to the lost connection while it publishes.
func TestAck_lostConnections(t *testing.T) {
	t.Parallel()
	url := testenv.NATSURL(t)
	for _, buffer := range []int{nats.DefaultWriteBufSize, 128} {
		t.Run(strconv.Itoa(buffer), func(t *testing.T) {
			t.Parallel()
			direct, network := natstest.Connect(t, url), testenv.NewProxy(t, url)
			name := natstest.Name(t, direct)
			conn, err := nats.Connect(network.URL(), nats.MaxReconnects(-1), nats.ReconnectWait(time.Millisecond), nats.ReconnectJitter(0, 0),
				nats.WriteBufferSize(buffer))
			must(t, err)
			t.Cleanup(conn.Close)
			const n = 100 // some are sent before the connection is lost, and some after it
			s := open(t, newTestConsumer(t, conn, Stream{Name: name}, inbox.ConsumerConfig{}).parts[0], n)
			for round := range 12 {
				publish(t, direct, name, n)
				var ds []driver.Delivery
				for len(ds) < n {
					more, err := s.Receive(t.Context(), n)
					must(t, err)
					ds = append(ds, more...)
				}
				network.Delay(time.Millisecond)
				cut := make(chan struct{})
				go func() {
					defer close(cut)
					time.Sleep(time.Duration(round) * 50 * time.Microsecond) // timing: the cut comes at various points of the call
					network.CutConnections()
				}()
				must(t, s.Ack(t.Context(), ds, round%2 == 0))
				<-cut
				network.Delay(0)
				c, err := natstest.JetStream(t, direct).Consumer(t.Context(), name, s.consumer)
				must(t, err)
				if n := c.CachedInfo().NumAckPending; n != 0 {
					t.Fatalf("round %d: %d acknowledged messages will be redelivered", round, n)
				}
			}
		})
	}
}
