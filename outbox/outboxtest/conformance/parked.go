package conformance

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// TestParked checks the operators' view of messages that wait for an attempt.
func TestParked(t *testing.T, b Backend) {
	for name, fn := range map[string]func(*testing.T, Store){
		"a list shows why messages wait":          listsWhyMessagesWait,
		"a list continues in pages":               listsParkedInPages,
		"a retried message is ready":              retriesParked,
		"a postponed message waits longer":        postponesParked,
		"a paced retry makes messages due apart":  pacesParked,
		"the later messages of a key follow":      retriesHeadOfKey,
		"a removed message frees its key":         removesHeadOfKey,
		"a change of many reports progress":       movesParkedInSteps,
		"a message that is ready is not counted":  leavesReadyAlone,
		"invalid changes are rejected":            rejectsParkedChanges,
		"changes race with relays":                racesWithRelays,
		"a message without a failure has no kind": groupsParked,
	} {
		each(t, b.Bubble, name, func(t *testing.T) { fn(t, b.Open(t)) })
	}
}

// by is the author of the changes.
const by = "ada"

// park writes messages and fails each once, so that they wait for a long time. It returns their ids.
func (s Store) park(t *testing.T, msgs ...outbox.Message) (ids []uuid.UUID) {
	t.Helper()
	s.write(t, msgs...)
	for left := len(msgs); left > 0; {
		b := s.claimLate(t, driver.Claim{})
		var failed []driver.Settlement
		for _, m := range b.Messages {
			failed = append(failed, driver.Settlement{ID: m.ID, Verdict: driver.Failed, Delay: long, Class: driver.Retryable, Err: "no route to 10.0.0.1"})
			ids = append(ids, m.ID)
		}
		s.settle(t, b, failed...)
		left -= len(failed)
	}
	return ids
}

func (s Store) wantParked(t *testing.T, want int) []outbox.DeadLetter {
	t.Helper()
	found, err := s.Parked.List(t.Context(), outbox.Filter{Whole: true})
	n, countErr := s.Parked.Count(t.Context(), outbox.Filter{})
	if err != nil || countErr != nil || len(found) != want || n != want {
		t.Fatalf("%d listed (%v), %d counted (%v), want %d", len(found), err, n, countErr, want)
	}
	return found
}

// A message that waits after an attempt has the class and the error of that attempt, and the kind of its later dead letter.
func listsWhyMessagesWait(t *testing.T, s Store) {
	id := s.park(t, message("k", "0"))[0]
	found := s.wantParked(t, 1)[0]
	if found.Message.ID != id || found.Message.Key != "k" || string(found.Message.Body) != `"0"` || found.Class != string(driver.Retryable) ||
		found.Error != "no route to 10.0.0.1" || found.Attempts != 1 || found.CreatedAt.IsZero() || !found.FailedAt.IsZero() {
		t.Errorf("listed %+v", found)
	}
	if wait := time.Until(found.DueAt); wait < long/2 || wait > 2*long {
		t.Errorf("due in %v", wait)
	}
	shown, err := s.Parked.Show(t.Context(), id)
	if err != nil || shown.Fingerprint != found.Fingerprint || shown.Message.ID != id {
		t.Errorf("shown %+v, %v", shown, err)
	}
	for f, want := range map[*outbox.Filter]int{
		{Fingerprint: found.Fingerprint}: 1, {ErrorContains: "NO ROUTE"}: 1, {Class: "permanent"}: 0, {Key: "k", Name: "order.placed"}: 1,
		{IDs: []uuid.UUID{id}}: 1, {IDs: []uuid.UUID{}}: 0, {Key: "other"}: 0,
	} {
		if n, err := s.Parked.Count(t.Context(), *f); n != want || err != nil {
			t.Errorf("%+v: %d, %v, want %d", *f, n, err, want)
		}
	}
	must(t, second(s.Parked.Replay(t.Context(), outbox.Filter{}, outbox.Replay{By: by})))
	b := s.claimLate(t, driver.Claim{})
	s.settle(t, b, driver.Settlement{ID: id, Verdict: driver.Dead, Class: driver.Retryable, Err: "no route to 10.0.0.2"})
	dead, err := s.DeadLetters.Show(t.Context(), id)
	if err != nil || dead.Fingerprint != found.Fingerprint || dead.Attempts != 2 {
		t.Errorf("dead with %+v, %v, want the kind %s", dead, err, found.Fingerprint)
	}
}

func second[T any](_ T, err error) error { return err }

func listsParkedInPages(t *testing.T, s Store) {
	const n = 23
	var msgs []outbox.Message
	for i := range n {
		later := message("", strconv.Itoa(i))
		later.NotBefore = time.Now().Add(time.Duration(1+i/5) * time.Hour) // timing: when a message is due
		msgs = append(msgs, later, message("", "ready"))
	}
	s.write(t, msgs...)
	list := func(limit int, after string) (page []listed, err error) {
		found, err := s.Parked.List(t.Context(), outbox.Filter{Limit: limit, After: after})
		for _, l := range found {
			page = append(page, listed{l.Message.ID, l.Cursor})
		}
		return page, err
	}
	all, err := list(0, "")
	if err != nil || len(all) != n {
		t.Fatalf("%d listed, %v", len(all), err)
	}
	wantPages(t, all, list)
	if _, err := list(1, "the last one"); err == nil {
		t.Error("an invalid list position was accepted")
	}
}

func groupsParked(t *testing.T, s Store) {
	later := message("", "later")
	later.NotBefore = time.Now().Add(long) // timing: when a message is due
	s.write(t, later)
	s.park(t, message("", "1"), message("", "2"))
	groups, err := s.Parked.Groups(t.Context(), outbox.Filter{})
	if err != nil || len(groups) != 2 {
		t.Fatalf("%+v, %v", groups, err)
	}
	if g := groups[0]; g.Count != 2 || g.Fingerprint == "" || g.Sample.DueAt.IsZero() || g.Last.IsZero() {
		t.Errorf("the larger group is %+v", g)
	}
	if g := groups[1]; g.Count != 1 || g.Fingerprint != "" || g.Sample.Class != "" || g.Sample.Attempts != 0 {
		t.Errorf("the smaller group is %+v", g)
	}
}

func retriesParked(t *testing.T, s Store) {
	ids := s.park(t, message("", "1"), message("", "2"), message("", "3"))
	one := outbox.Filter{IDs: ids[:1]}
	if got, err := s.Parked.Replay(t.Context(), one, outbox.Replay{DryRun: true}); got != (outbox.Replayed{Returned: 1}) || err != nil {
		t.Errorf("dry run: %+v, %v", got, err)
	}
	if b := s.claim(t, driver.Claim{}); len(b.Messages) > 0 {
		t.Fatalf("a dry run released %v", bodies(b))
	}
	if got, err := s.Parked.Replay(t.Context(), one, outbox.Replay{By: by, Reason: "route restored"}); got != (outbox.Replayed{Returned: 1}) || err != nil {
		t.Errorf("%+v, %v", got, err)
	}
	b := s.claimLate(t, driver.Claim{})
	if len(b.Messages) != 1 || b.Messages[0].ID != ids[0] || b.Messages[0].Attempts != 1 {
		t.Fatalf("claimed %+v", b.Messages)
	}
	s.settle(t, b, outcomes(driver.Published, b.Messages...)...)
	s.wantParked(t, 2)
}

func postponesParked(t *testing.T, s Store) {
	soon := message("", "soon")
	soon.NotBefore = time.Now().Add(long) // timing: when a message is due
	s.write(t, soon)
	for _, delay := range []time.Duration{24 * time.Hour, time.Minute} {
		if got, err := s.Parked.Replay(t.Context(), outbox.Filter{}, outbox.Replay{By: by, Delay: delay}); got != (outbox.Replayed{Returned: 1}) || err != nil {
			t.Errorf("by %v: %+v, %v", delay, got, err)
		}
		if wait := time.Until(s.wantParked(t, 1)[0].DueAt); wait < delay/2 || wait > 2*delay {
			t.Errorf("postponed by %v: due in %v", delay, wait)
		}
	}
	s.wantReady(t)
}

func pacesParked(t *testing.T, s Store) {
	s.park(t, message("", "1"), message("", "2"), message("", "3"))
	_, err := s.Parked.Replay(t.Context(), outbox.Filter{}, outbox.Replay{By: by, Delay: time.Hour, PerSecond: 0.1})
	must(t, err)
	found := s.wantParked(t, 3)
	for i, d := range found[1:] {
		if apart := d.DueAt.Sub(found[i].DueAt); apart != 10*time.Second { // timing: due times of one clock
			t.Errorf("due %v apart, want 10s", apart)
		}
	}
}

// keyed returns n messages of one key, whose bodies are their order.
func keyed(key string, n int) (msgs []outbox.Message) {
	for i := range n {
		msgs = append(msgs, outbox.Message{Name: "order.placed", Key: key, Body: []byte(strconv.Itoa(i))})
	}
	return msgs
}

// parkHead writes n messages of a key and parks the first one. The others are held behind it.
func (s Store) parkHead(t *testing.T, key string, n int) (head uuid.UUID) {
	t.Helper()
	s.write(t, keyed(key, n)...)
	b := s.claimLate(t, driver.Claim{Limit: 1})
	head = b.Messages[0].ID
	s.settle(t, b, driver.Settlement{ID: head, Verdict: driver.Failed, Delay: long, Class: driver.Retryable, Err: "scripted"})
	s.wantReady(t) // a store may move the others behind it
	s.wantParked(t, 1)
	return head
}

func retriesHeadOfKey(t *testing.T, s Store) {
	const n = 30
	s.parkHead(t, "k", n)
	must(t, second(s.Parked.Replay(t.Context(), outbox.Filter{}, outbox.Replay{By: by})))
	s.wantKeyed(t, "k", 0, n)
}

func removesHeadOfKey(t *testing.T, s Store) {
	const n = 30
	head := s.parkHead(t, "k", n)
	if removed, err := s.Parked.Remove(t.Context(), outbox.Filter{IDs: []uuid.UUID{head}}, outbox.Removal{By: by}); removed != 1 || err != nil {
		t.Errorf("%d removed, %v", removed, err)
	}
	s.wantKeyed(t, "k", 1, n)
	s.wantParked(t, 0)
}

// wantKeyed publishes the messages of a key until the last one has come, and checks that they come in order.
func (s Store) wantKeyed(t *testing.T, key string, first, end int) {
	t.Helper()
	var got []string
	for len(got) < end-first {
		b := s.claimLate(t, driver.Claim{})
		for _, m := range b.Messages {
			if m.Key == key {
				got = append(got, string(m.Body))
			}
		}
		s.settle(t, b, outcomes(driver.Published, b.Messages...)...)
	}
	var want []string
	for i := first; i < end; i++ {
		want = append(want, strconv.Itoa(i))
	}
	if !slices.Equal(got, want) {
		t.Errorf("published %v, want %v", got, want)
	}
}

func movesParkedInSteps(t *testing.T, s Store) {
	var msgs []outbox.Message
	for i := range manyDead {
		m := message("", strconv.Itoa(i))
		m.NotBefore = time.Now().Add(long) // timing: when a message is due
		msgs = append(msgs, m)
	}
	s.write(t, msgs...)
	var told []int
	moved, err := s.Parked.Replay(t.Context(), outbox.Filter{}, outbox.Replay{
		By: by, Delay: 2 * time.Hour, Progress: func(r outbox.Replayed) { told = append(told, r.Returned) },
	})
	if err != nil || moved != (outbox.Replayed{Returned: manyDead}) {
		t.Errorf("%+v, %v", moved, err)
	}
	wantSteps(t, told, manyDead)
	told = nil
	removed, err := s.Parked.Remove(t.Context(), outbox.Filter{Limit: manyDead - 1}, outbox.Removal{By: by, Progress: func(n int) { told = append(told, n) }})
	if err != nil || removed != manyDead-1 {
		t.Errorf("%d removed, %v", removed, err)
	}
	wantSteps(t, told, manyDead-1)
	s.wantParked(t, 1)
}

// A change of messages that a claim has released changes nothing, and says so.
func leavesReadyAlone(t *testing.T, s Store) {
	ids := s.park(t, message("", "1"))
	must(t, second(s.Parked.Replay(t.Context(), outbox.Filter{}, outbox.Replay{By: by})))
	b := s.claimLate(t, driver.Claim{})
	one := outbox.Filter{IDs: ids}
	moved, err := s.Parked.Replay(t.Context(), one, outbox.Replay{By: by, Delay: time.Hour})
	if moved != (outbox.Replayed{}) || err != nil {
		t.Errorf("postponed %+v, %v", moved, err)
	}
	if n, err := s.Parked.Remove(t.Context(), one, outbox.Removal{By: by}); n != 0 || err != nil {
		t.Errorf("removed %d, %v", n, err)
	}
	s.settle(t, b)
	s.wantReady(t, quoted("1")...)
}

func rejectsParkedChanges(t *testing.T, s Store) {
	s.park(t, message("", "1"))
	edit := func(m outbox.Message) ([]byte, error) { return m.Body, nil }
	for name, r := range map[string]outbox.Replay{
		"no author": {}, "an edit": {By: by, Edit: edit}, "a negative delay": {By: by, Delay: -1}, "a long delay": {By: by, Delay: 24*time.Hour + 1},
	} {
		if got, err := s.Parked.Replay(t.Context(), outbox.Filter{}, r); err == nil || got.Returned > 0 {
			t.Errorf("%s: %+v", name, got)
		}
	}
	failed := outbox.Filter{FailedBefore: time.Now()}
	_, err1 := s.Parked.List(t.Context(), failed)
	_, err2 := s.Parked.Count(t.Context(), failed)
	_, err3 := s.Parked.Groups(t.Context(), failed)
	_, err4 := s.Parked.Replay(t.Context(), failed, outbox.Replay{By: by})
	_, err5 := s.Parked.Remove(t.Context(), failed, outbox.Removal{By: by})
	_, err6 := s.Parked.Remove(t.Context(), outbox.Filter{}, outbox.Removal{})
	_, err7 := s.DeadLetters.Replay(t.Context(), outbox.Filter{}, outbox.Replay{By: by, Delay: time.Second})
	for i, err := range []error{err1, err2, err3, err4, err5, err6, err7} {
		if err == nil {
			t.Errorf("%d: accepted", i+1)
		}
	}
	s.wantParked(t, 1)
}

// Operators retry, postpone and remove messages while relays publish them and messages fail. Each message is published
// once or removed, and the messages of a key come in order.
func racesWithRelays(t *testing.T, s Store) {
	const keys, perKey = 6, 25
	total := keys * perKey
	for k := range keys {
		s.write(t, keyed(fmt.Sprint("k", k), perKey)...)
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var mu sync.Mutex
	published, last, removed := map[uuid.UUID]int{}, map[string]int{}, 0
	over := func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(published)+removed >= total
	}
	var running sync.WaitGroup
	for range 2 {
		running.Go(func() {
			for !over() && ctx.Err() == nil {
				publishSome(ctx, t, s, func(m driver.Message) {
					mu.Lock()
					defer mu.Unlock()
					n, _ := strconv.Atoi(string(m.Body))
					if before, known := last[m.Key]; known && n <= before {
						t.Errorf("%s: %d came after %d", m.Key, n, before)
					}
					last[m.Key] = n
					published[m.ID]++
				})
			}
		})
		running.Go(func() {
			for !over() && ctx.Err() == nil {
				n := changeSome(ctx, t, s)
				mu.Lock()
				removed += n
				mu.Unlock()
				time.Sleep(time.Millisecond)
			}
		})
	}
	ended := time.AfterFunc(patience, stop)
	running.Wait()
	ended.Stop()
	again := slices.ContainsFunc(slices.Collect(maps.Values(published)), func(n int) bool { return n > 1 })
	if len(published)+removed != total || again {
		t.Errorf("%d published and %d removed of %d; one of them twice: %t", len(published), removed, total, again)
	}
}

// publishSome claims messages and settles them: most are published, the others fail.
func publishSome(ctx context.Context, t *testing.T, s Store, publish func(driver.Message)) {
	b, err := s.Source.Claim(ctx, driver.Claim{Limit: 20, Lease: lease})
	if err != nil {
		if ctx.Err() == nil {
			t.Errorf("Claim: %v", err)
		}
		return
	}
	var settled []driver.Settlement
	failed := map[string]bool{}
	for _, m := range b.Messages {
		if failed[m.Key] {
			continue
		}
		if rand.IntN(3) == 0 {
			failed[m.Key] = true
			delay := []time.Duration{0, 5 * time.Millisecond, long}[rand.IntN(3)]
			settled = append(settled, driver.Settlement{ID: m.ID, Verdict: driver.Failed, Delay: delay, Class: driver.Retryable, Err: "scripted"})
			continue
		}
		publish(m)
		settled = append(settled, driver.Settlement{ID: m.ID, Verdict: driver.Published})
	}
	if len(b.Leases) == 0 {
		time.Sleep(time.Millisecond)
		return
	}
	if _, err := s.Source.Settle(context.WithoutCancel(ctx), b, settled); err != nil {
		t.Errorf("Settle: %v", err)
	}
}

// changeSome changes parked messages at random, and returns how many it removed.
func changeSome(ctx context.Context, t *testing.T, s Store) (removed int) {
	var err error
	switch rand.IntN(8) {
	case 0:
		removed, err = s.Parked.Remove(ctx, outbox.Filter{Limit: 1}, outbox.Removal{By: by})
	case 1, 2:
		_, err = s.Parked.Replay(ctx, outbox.Filter{Limit: 3}, outbox.Replay{By: by, Delay: time.Duration(rand.IntN(10)) * time.Millisecond})
	default:
		_, err = s.Parked.Replay(ctx, outbox.Filter{}, outbox.Replay{By: by})
	}
	if err != nil && ctx.Err() == nil {
		t.Errorf("change: %v", err)
	}
	return removed
}
