package inboxredis_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
)

// A session that could not settle messages ends. Otherwise they would stay in its hand and occupy its window
// forever.
func TestSettlingFails(t *testing.T) {
	t.Parallel()
	for what, settle := range map[string]func(driver.Session, []driver.Delivery) error{
		"ack":       func(s driver.Session, ds []driver.Delivery) error { return s.Ack(t.Context(), ds, false) },
		"give back": func(s driver.Session, ds []driver.Delivery) error { return s.GiveBack(t.Context(), ds) },
	} {
		for _, ordered := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, ordered %v", what, ordered), func(t *testing.T) {
				t.Parallel()
				f := newFixture(t, ordered)
				publish(t, f.direct, event(), event(), event())
				source := newSource(t, f.through, inboxredis.Config{Timeout: time.Second, ConsumerConfig: inbox.ConsumerConfig{Ordered: ordered}})
				s := open(t, running(t, source), 2)
				ds := receive(t, s, 2) // nothing else is read, because the window is full
				f.network.Pause()
				if err := settle(s, ds); err == nil {
					t.Error("no error without a server")
				}
				f.network.Heal()
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				if more, err := s.Receive(ctx, 2); len(more) == 0 && ctx.Err() != nil {
					t.Errorf("neither a message nor an end: %v", err)
				}
			})
		}
	}
}

// lateAnswers delays the replies to requeues.
type lateAnswers struct{ by time.Duration }

func (lateAnswers) DialHook(next redis.DialHook) redis.DialHook { return next }

func (lateAnswers) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (l lateAnswers) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if strings.Contains(fmt.Sprint(cmd.Args()...), "holdfast:returned") {
			time.Sleep(l.by)
		}
		return err
	}
}

// A message is redelivered soon even if its session finds it before the reply to its requeue.
func TestGiveBack_redeliversDespiteLateReply(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "it asserts a time")
	f := newFixture(t, false)
	publish(t, f.direct, event())
	f.through.AddHook(lateAnswers{2500 * time.Millisecond}) // at least one pass for entries without an owner
	source, _ := f.open(t, f.through, groupName)
	s := open(t, running(t, source), 2)
	ds := receive(t, s, 1)
	given := make(chan error, 1)
	go func() { given <- s.GiveBack(t.Context(), ds) }()
	began := time.Now()
	receive(t, s, 1)
	if took := time.Since(began); took > 7*time.Second { // after 8 s anybody may claim it
		t.Errorf("it came again after %v", took)
	}
	noError(t, <-given)
}

// A message that was deleted from the stream while in flight can still be moved.
func TestMove_afterDeletionInFlight(t *testing.T) {
	t.Parallel()
	f := newFixture(t, false)
	publish(t, f.direct, event(), event())
	source, letters := f.open(t, f.direct, groupName)
	s := open(t, running(t, source), 2)
	ds := receive(t, s, 2)
	noError(t, f.direct.XTrimMaxLen(t.Context(), stream, 0).Err())
	testenv.Eventually(t, func() error { // Redis drops them when they are renewed
		pending, err := f.direct.XPending(t.Context(), stream, groupName).Result()
		if err == nil && pending.Count > 0 {
			err = fmt.Errorf("%d pending", pending.Count)
		}
		return err
	})
	letter := driver.NewDeadLetter(ds[0].Message(), driver.Failure{Class: driver.ClassDefault}, "test", time.Now())
	moves := []driver.Move{{Delivery: ds[0], Target: driver.ToDead, DeadLetter: letter}, {Delivery: ds[1], Target: driver.ToLater}}
	noError(t, errors.Join(source.Move(t.Context(), moves)...))
	dead := 0
	depths, err := letters.Depths(t.Context())
	for _, d := range depths {
		dead += d.Messages
	}
	if err != nil || dead != 1 {
		t.Errorf("%d dead letters, %v", dead, err)
	}
	if got := receive(t, s, 1)[0].Message().ID; got != ds[1].Message().ID {
		t.Errorf("message %v is retried", got)
	}
}

// Moves to a silent server take one timeout for any number of pipelines, even if the client has a shorter timeout.
func TestSilentMoves(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "it asserts a time")
	f := newFixture(t, false)
	const n = 5
	for range n {
		m := event()
		m.Body = []byte(`"` + strings.Repeat("x", 4<<20) + `"`)
		publish(t, f.direct, m)
	}
	source := newSource(t, f.through, inboxredis.Config{Timeout: 5 * time.Second})
	var moves []driver.Move
	for _, d := range receive(t, open(t, running(t, source), n), n) {
		moves = append(moves, driver.Move{Delivery: d, Target: driver.ToLater})
	}
	f.network.Pause()
	began := time.Now()
	for _, err := range source.Move(t.Context(), moves) {
		if !errors.Is(err, driver.ErrUnavailable) {
			t.Error(err)
		}
	}
	if took := time.Since(began); took > 6*time.Second {
		t.Errorf("%v", took)
	}
	f.network.Heal()
}

// A foreign value at the key of the retries is delivered as an unreadable message, and delays no retry.
func TestForeignRetry(t *testing.T) {
	t.Parallel()
	f := newFixture(t, false)
	// Text; lists of four texts, of a text and two lists, and with nothing and true in them.
	members := []string{"junk", "\x94\xa1a\xa1b\xa1c\xa1d", "\x93\xa1a\x90\x90", "\x93\xa1a\xc0\xa1b", "\x93\xa1a\xc3\xa1b", "\x91\xa1a"}
	for i, member := range members {
		noError(t, f.direct.ZAdd(t.Context(), "{"+stream+"}:"+groupName+":later", redis.Z{Score: float64(i), Member: member}).Err())
	}
	source, _ := f.open(t, f.direct, groupName)
	for i, d := range receive(t, open(t, running(t, source), 10), len(members)) {
		if string(d.Message().Body) != members[i] {
			t.Errorf("%q", d.Message().Body)
		}
	}
}

// Without memory no message is moved, and no attempt counts. Calls that free memory still work: messages are
// acknowledged and requeued, operators make retries due, and a consumer takes over and gets due retries.
func TestWithoutMemory(t *testing.T) {
	t.Parallel()
	for _, ordered := range []bool{false, true} {
		t.Run(fmt.Sprint("ordered ", ordered), func(t *testing.T) {
			t.Parallel()
			client := redistest.Client(t, testenv.Private(t, testenv.Redis, "--maxmemory-policy", "noeviction").URL())
			setup(t, client, groupName)
			publish(t, client, event(), event(), event(), event())
			source := running(t, newSource(t, client, inboxredis.Config{ConsumerConfig: inbox.ConsumerConfig{Ordered: ordered}}))
			s := open(t, source, 4)
			ds := receive(t, s, 4)
			later := func(d driver.Delivery) error {
				return source.Move(t.Context(), []driver.Move{{Delivery: d, Target: driver.ToLater, Delay: time.Hour}})[0]
			}
			noError(t, later(ds[0]))
			noError(t, client.ConfigSet(t.Context(), "maxmemory", "1").Err())
			noError(t, source.(driver.Delayer).Retrying().Scan(t.Context(), driver.WaitingRetry, func(d *inbox.DeadLetter) (driver.Outcome, error) {
				d.DueAt = time.Now()
				return driver.Return, nil
			}, func(_ inbox.DeadLetter, err error) { t.Errorf("made due without memory: %v", err) }))
			if err := later(ds[1]); !errors.Is(err, driver.ErrUnavailable) {
				t.Errorf("move without memory: %v, want ErrUnavailable", err)
			}
			noError(t, s.Ack(t.Context(), ds[2:3], false), s.GiveBack(t.Context(), ds[3:]), s.Close(t.Context()))
			receive(t, open(t, source, 3), 3)
			noError(t, client.ConfigSet(t.Context(), "maxmemory", "0").Err())
		})
	}
}

// A blocked read that is ended from outside, for example by a failover, does not mean that the group is missing.
func TestUnblocked(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.Redis)
	client := redistest.Client(t, server.URL())
	setup(t, client, groupName)
	s := open(t, newSource(t, client, inboxredis.Config{}), 1)
	ended := make(chan error, 1)
	go func() {
		_, err := s.Receive(t.Context(), 1)
		ended <- err
	}()
	testenv.Eventually(t, func() error {
		for line := range strings.Lines(client.ClientList(t.Context()).Val()) {
			if strings.Contains(line, "cmd=xreadgroup") {
				id, _, _ := strings.Cut(strings.TrimPrefix(line, "id="), " ")
				client.Do(t.Context(), "CLIENT", "UNBLOCK", id, "ERROR")
			}
		}
		select {
		case err := <-ended:
			if !strings.Contains(fmt.Sprint(err), "UNBLOCKED") || errors.Is(err, driver.ErrMissing) {
				t.Error(err)
			}
			return nil
		default:
			return errors.New("the read is still blocked")
		}
	})
}

// Messages that together would exceed the timeout arrive in portions, even after small messages.
func TestSlowWay(t *testing.T) {
	t.Parallel()
	for _, ordered := range []bool{false, true} {
		t.Run(fmt.Sprint("ordered ", ordered), func(t *testing.T) {
			t.Parallel()
			if ordered {
				testenv.Nightly(t, "the shared stream is read with every change")
			}
			f := newFixture(t, ordered)
			const small, large = 100, 30
			for n := range small + large {
				m := event()
				if n >= small {
					m.Body = []byte(`"` + strings.Repeat("x", 100<<10) + `"`)
				}
				publish(t, f.direct, m)
			}
			opts := *f.direct.Options()
			opts.Addr = slowWay(t, opts.Addr, 1<<20)
			client := redis.NewClient(&opts)
			defer func() { _ = client.Close() }()
			source := running(t, newSource(t, client, inboxredis.Config{Timeout: 2 * time.Second, ConsumerConfig: inbox.ConsumerConfig{Ordered: ordered}}))
			ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
			defer cancel()
			came := map[uuid.UUID]bool{}
			for len(came) < small+large {
				if ctx.Err() != nil {
					t.Fatalf("%d of %d messages came", len(came), small+large)
				}
				consume(ctx, source, small+large, came)
			}
		})
	}
}

// consume settles the messages of a session until it ends, or until enough came. If an Ack was not answered, its
// message may be settled already.
// be settled, and not come again.
func consume(ctx context.Context, source driver.Source, want int, came map[uuid.UUID]bool) {
	s, err := source.Open(ctx)
	if err != nil {
		return
	}
	defer func() { _ = s.Close(context.WithoutCancel(ctx)) }()
	for err = s.Start(ctx, want); err == nil && len(came) < want; {
		var ds []driver.Delivery
		if ds, err = s.Receive(ctx, want); err != nil {
			return
		}
		for _, d := range ds {
			came[d.Message().ID] = true
		}
		err = s.Ack(ctx, ds, false)
	}
}

// slowWay limits the bytes per second of a server's replies, on each connection.
func slowWay(t *testing.T, server string, rate int) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	noError(t, err)
	var all sync.WaitGroup
	t.Cleanup(func() {
		_ = listener.Close()
		all.Wait()
	})
	all.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			up, err := net.Dial("tcp", server)
			if err != nil {
				_ = client.Close()
				continue
			}
			all.Go(func() {
				defer up.Close()
				_, _ = io.Copy(up, client)
			})
			all.Go(func() {
				defer client.Close()
				_, _ = io.Copy(client, slowly{up, rate})
			})
		}
	})
	return listener.Addr().String()
}

// slowly limits the bytes read per second.
type slowly struct {
	io.Reader
	rate int
}

func (s slowly) Read(p []byte) (int, error) {
	n, err := s.Reader.Read(p[:min(len(p), 16<<10)])
	time.Sleep(time.Duration(n) * time.Second / time.Duration(s.rate))
	return n, err
}

// Three groups read and acknowledge at random. Trimming removes no message that a group still needs, and finally
// all processed messages.
func TestTrim(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.Redis, "--stream-node-max-entries", "1")
	client := redistest.Client(t, server.URL())
	groups := []string{groupName, "mailing", "audit"}
	open := map[string]map[string]bool{} // by group: not acknowledged
	for _, g := range groups {
		setup(t, client, g)
		open[g] = map[string]bool{}
	}
	sources, _, err := inboxredis.NewSources(client, stream, inboxredis.Config{Group: groupName})
	noError(t, err)
	pending := map[string][]string{}
	all := 0
	check := func() {
		t.Helper()
		noError(t, inboxredis.Trim(t.Context(), sources[0]))
		there := map[string]bool{}
		for _, m := range client.XRange(t.Context(), stream, "-", "+").Val() {
			there[m.ID] = true
		}
		for g, ids := range open {
			for id := range ids {
				if !there[id] {
					t.Fatalf("entry %s was removed, which group %q is not done with", id, g)
				}
			}
		}
	}
	rng := rand.New(rand.NewPCG(1, 2))
	for range 400 {
		switch g := groups[rng.IntN(len(groups))]; rng.IntN(4) {
		case 0:
			for range rng.IntN(5) {
				// Ids whose counts differ in length, and are too large for a float to distinguish.
				id := client.XAdd(t.Context(), &redis.XAddArgs{Stream: stream, ID: fmt.Sprintf("%d-%d", 5+all/7, uint64(1)<<(54+all%7)), Values: []string{"n", "1"}}).Val()
				all++
				for _, g := range groups {
					open[g][id] = true
				}
			}
		case 1:
			read, _ := client.XReadGroup(t.Context(), &redis.XReadGroupArgs{
				Group: g, Consumer: "c", Streams: []string{stream, ">"}, Count: int64(1 + rng.IntN(4)), Block: -1,
			}).Result()
			for _, s := range read {
				for _, m := range s.Messages {
					pending[g] = append(pending[g], m.ID)
				}
			}
		case 2:
			if n := len(pending[g]); n > 0 {
				i := rng.IntN(n)
				id := pending[g][i]
				pending[g] = slices.Delete(pending[g], i, i+1)
				client.XAck(t.Context(), stream, g, id)
				delete(open[g], id)
			}
		default:
			check()
		}
	}
	for _, g := range groups {
		_, _ = client.XReadGroup(t.Context(), &redis.XReadGroupArgs{Group: g, Consumer: "c", Streams: []string{stream, ">"}, Block: -1}).Result()
		for id := range open[g] {
			client.XAck(t.Context(), stream, g, id)
		}
		clear(open[g])
	}
	for range 1 + all/100 { // Redis bounds the entries that one call removes
		check()
	}
	if n := client.XLen(t.Context(), stream).Val(); n > 2 || all < 100 {
		t.Errorf("%d of %d entries are left that all are done with", n, all)
	}
}

// One trim pass removes everything processed, for any amount.
func TestTrimKeepsUp(t *testing.T) {
	t.Parallel()
	f := newFixture(t, false)
	const n = 15_000
	fill(t, f.direct, stream, n)
	noError(t, inboxredis.Trim(t.Context(), newSource(t, f.direct, inboxredis.Config{})))
	if left := f.direct.XLen(t.Context(), stream).Val(); left > n/10 {
		t.Errorf("%d of %d entries are left", left, n)
	}
}

// The Config can keep the stream for others. The retries belong to one group and are trimmed.
func TestKeepProcessed(t *testing.T) {
	t.Parallel()
	f := newFixture(t, false)
	const n = 1000
	retries := "{" + stream + "}:" + groupName + ":retries"
	fill(t, f.direct, stream, n)
	fill(t, f.direct, retries, n)
	noError(t, inboxredis.Trim(t.Context(), newSource(t, f.direct, inboxredis.Config{KeepProcessed: true})))
	if left := f.direct.XLen(t.Context(), retries).Val(); left > n/2 {
		t.Errorf("%d of %d retries are left", left, n)
	}
	if left := f.direct.XLen(t.Context(), stream).Val(); left != n {
		t.Errorf("%d of %d entries are left", left, n)
	}
}

// fill adds entries that the group has processed.
func fill(t *testing.T, client redis.UniversalClient, key string, n int) {
	t.Helper()
	pipe := client.Pipeline()
	for range n {
		pipe.XAdd(t.Context(), &redis.XAddArgs{Stream: key, Values: []string{"n", "1"}})
	}
	pipe.XGroupSetID(t.Context(), key, groupName, "$")
	if _, err := pipe.Exec(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// Names without entries are removed. A name with entries stays, and so do its entries.
func TestForget(t *testing.T) {
	t.Parallel()
	f := newFixture(t, false)
	source, _ := f.open(t, f.direct, groupName)
	publish(t, f.direct, event())
	s := open(t, source, 1)
	ds := receive(t, s, 1)
	noError(t, f.direct.XGroupCreateConsumer(t.Context(), stream, groupName, "gone").Err())
	names := func() (n int) {
		for _, c := range f.direct.XInfoConsumers(t.Context(), stream, groupName).Val() {
			if c.Name == "gone" || c.Pending > 0 {
				n++
			}
		}
		return n
	}
	for idle, want := range map[time.Duration]int{time.Hour: 2} {
		if err := inboxredis.Forget(t.Context(), source, idle); err != nil || names() != want {
			t.Errorf("%d names after %v, want %d: %v", names(), idle, want, err)
		}
	}
	time.Sleep(10 * time.Millisecond)
	if err := inboxredis.Forget(t.Context(), source, 0); err != nil || names() != 1 {
		t.Errorf("%d names, want 1: %v", names(), err)
	}
	noError(t, s.Ack(t.Context(), ds, false))
	if err := s.Close(t.Context()); err != nil || len(f.direct.XInfoConsumers(t.Context(), stream, groupName).Val()) != 0 {
		t.Errorf("a session leaves its name: %v", err)
	}
}

// largestReply records the largest number of text bytes in a script's reply.
type largestReply struct{ bytes *atomic.Int64 }

func (l largestReply) DialHook(next redis.DialHook) redis.DialHook { return next }

func (l largestReply) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (l largestReply) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if reply, ok := cmd.(*redis.Cmd); ok {
			l.bytes.Store(max(l.bytes.Load(), textBytes(reply.Val())))
		}
		return err
	}
}

func textBytes(value any) (n int64) {
	switch v := value.(type) {
	case string:
		return int64(len(v))
	case []any:
		for _, one := range v {
			n += textBytes(one)
		}
	}
	return n
}

// A scan reads pages of at most 4 MiB plus one message, even after small messages. A count reads no messages.
func TestDeadLetters_pagesHaveABoundInBytes(t *testing.T) {
	t.Parallel()
	const small, large, size = 100, 12, 1 << 20
	f := newFixture(t, false)
	key := "{" + stream + "}:" + groupName + ":failed." + driver.ClassDefault
	for i := range small + large {
		body := "{}"
		if i >= small {
			body = `"` + strings.Repeat("x", size) + `"`
		}
		id := f.direct.XAdd(t.Context(), &redis.XAddArgs{Stream: key, Values: map[string]any{"id": ids.New().String(), "name": "a", "body": body}})
		if err := id.Err(); err != nil {
			t.Fatal(err)
		}
	}
	largest := largestReply{new(atomic.Int64)}
	f.direct.AddHook(largest)
	letters := newConsumer(t, f.direct, inbox.NewMux(), inboxredis.Config{Group: groupName}).DeadLetters()
	if _, err := letters.Groups(t.Context(), inbox.Filter{Limit: 1}); err != nil {
		t.Fatal(err)
	}
	found, err := letters.List(t.Context(), inbox.Filter{Limit: 1000})
	if len(found) != small+large || err != nil {
		t.Errorf("%d letters, error %v", len(found), err)
	}
	if got := largest.bytes.Load(); got < size || got > 5*size+100_000 {
		t.Errorf("a page has %d bytes", got)
	}
}

// A scan of waiting messages visits all that are still there, although others of the same due time are removed meanwhile,
// and more of one due time than fit on a page.
func TestRetrying_visitsAllOfOneDueTime(t *testing.T) {
	t.Parallel()
	const n, removed = 250, 30
	f := newFixture(t, false)
	key := "{" + stream + "}:" + groupName + ":later"
	source, _ := f.open(t, f.direct, groupName)
	running(t, source)
	for range n {
		publish(t, f.direct, event())
	}
	s := open(t, source, n)
	var moves []driver.Move
	for _, d := range receive(t, s, n) {
		moves = append(moves, driver.Move{Delivery: d, Target: driver.ToLater, Delay: time.Hour})
	}
	noError(t, source.Move(t.Context(), moves)...)
	members := f.direct.ZRange(t.Context(), key, 0, -1).Val()
	at := float64(time.Now().Add(time.Hour).UnixMilli())
	for i, member := range members {
		later := float64(0)
		if i >= n-20 {
			later = float64(i) // the last ones are due one after the other
		}
		noError(t, f.direct.ZAdd(t.Context(), key, redis.Z{Score: at + later, Member: member}).Err())
	}
	visited := map[string]int{}
	noError(t, source.(driver.Delayer).Retrying().Scan(t.Context(), driver.WaitingRetry, func(d *inbox.DeadLetter) (driver.Outcome, error) {
		if visited[d.Message.ID.String()]++; len(visited) == 100 {
			for _, member := range f.direct.ZRange(t.Context(), key, 0, removed-1).Val() { // these were visited
				noError(t, f.direct.ZRem(t.Context(), key, member).Err())
			}
		}
		return driver.Keep, nil
	}, func(_ inbox.DeadLetter, err error) { t.Error(err) }))
	for id, times := range visited {
		if times != 1 {
			t.Errorf("%s was visited %d times", id, times)
		}
	}
	if len(visited) != n {
		t.Errorf("%d visited, want %d", len(visited), n)
	}
}

// A scan visits all messages of one due time, although visited ones are removed after one of its pages.
func TestRetrying_messagesRemovedBetweenPages(t *testing.T) {
	t.Parallel()
	const removed = 10
	for _, tt := range []struct{ n, after int }{{110, 1}, {110, 2}, {250, 1}, {250, 2}} {
		t.Run(fmt.Sprintf("of %d after page %d", tt.n, tt.after), func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, false)
			key := "{" + stream + "}:" + groupName + ":later"
			due := float64(time.Now().Add(time.Hour).UnixMilli())
			for i := range tt.n {
				member := packed("orders 1-"+strconv.Itoa(i), "id", ids.New().String(), "name", "order.placed", "body", "{}")
				noError(t, f.direct.ZAdd(t.Context(), key, redis.Z{Score: due, Member: member}).Err())
			}
			source, _ := f.open(t, f.through, groupName)
			pages := 0
			f.through.AddHook(afterScripts{func() {
				if pages++; pages == tt.after { // the first members were visited
					noError(t, f.direct.ZRemRangeByRank(t.Context(), key, 0, removed-1).Err())
				}
			}})
			visited := map[string]bool{}
			noError(t, source.(driver.Delayer).Retrying().Scan(t.Context(), driver.WaitingRetry, func(d *inbox.DeadLetter) (driver.Outcome, error) {
				visited[d.Message.ID.String()] = true
				return driver.Keep, nil
			}, func(_ inbox.DeadLetter, err error) { t.Error(err) }))
			if len(visited) != tt.n {
				t.Errorf("%d visited, want %d", len(visited), tt.n)
			}
		})
	}
}

// packed returns at most 15 short texts as an array of MessagePack.
func packed(texts ...string) string {
	all := []byte{0x90 | byte(len(texts))}
	for _, text := range texts {
		all = append(append(all, 0xd9, byte(len(text))), text...)
	}
	return string(all)
}

// afterScripts calls a function after each script that succeeded.
type afterScripts struct{ call func() }

func (a afterScripts) DialHook(next redis.DialHook) redis.DialHook { return next }

func (a afterScripts) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (a afterScripts) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if err == nil && strings.HasPrefix(cmd.Name(), "eval") {
			a.call()
		}
		return err
	}
}
