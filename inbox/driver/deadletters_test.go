package driver_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/ids"
)

// shelf is a driver.DeadLetters in memory, for one goroutine.
type shelf struct {
	dead     []inbox.DeadLetter
	returned []uuid.UUID
	refuse   uuid.UUID // the id that cannot be returned or dropped
	broken   error     // of Depths
	held     string    // the class that another session has in flight
	onReturn func(inbox.DeadLetter)
	onDepths func()
}

var errShut = errors.New("shut")

func (s *shelf) Depths(context.Context) ([]driver.Depth, error) {
	if s.onDepths != nil {
		s.onDepths()
	}
	count := map[string]int{}
	for _, d := range s.dead {
		count[d.Class]++
	}
	if s.held != "" {
		count[s.held] += 0
	}
	var depths []driver.Depth
	for class, n := range count {
		depths = append(depths, driver.Depth{Class: class, Messages: n, Held: class == s.held})
	}
	slices.SortFunc(depths, func(a, b driver.Depth) int { return strings.Compare(a.Class, b.Class) })
	return depths, s.broken
}

func (s *shelf) Scan(
	ctx context.Context, class string, visit func(*inbox.DeadLetter) (driver.Outcome, error), failed func(inbox.DeadLetter, error),
) error {
	for _, d := range slices.Clone(s.dead) {
		if d.Class != class {
			continue
		}
		outcome, err := visit(&d)
		if errors.Is(err, driver.ErrDone) {
			return nil
		}
		if err := errors.Join(err, ctx.Err()); err != nil {
			return err
		}
		if outcome != driver.Keep && s.refuse != uuid.Nil && d.Message.ID == s.refuse {
			failed(d, errShut)
			continue
		}
		s.end(d, outcome)
	}
	if class == s.held {
		return inbox.ErrHeld
	}
	return nil
}

func (s *shelf) end(d inbox.DeadLetter, outcome driver.Outcome) {
	if outcome == driver.Keep {
		return
	}
	s.dead = slices.DeleteFunc(s.dead, func(other inbox.DeadLetter) bool { return other.Message.ID == d.Message.ID && other.Class == d.Class })
	if outcome == driver.Return {
		s.returned = append(s.returned, d.Message.ID)
		if s.onReturn != nil {
			s.onReturn(d)
		}
	}
}

// put adds a dead letter of the queue orders, modified by change.
func (s *shelf) put(change func(d *inbox.DeadLetter)) uuid.UUID {
	now := time.Now()
	d := inbox.DeadLetter{
		Message: inbox.Message{ID: ids.Deterministic(now, fmt.Sprint(len(s.dead), len(s.returned))), Name: "order.placed", Queue: "orders"},
		Class:   driver.ClassDefault, Error: "boom", FailedAt: now, FirstFailedAt: now,
	}
	change(&d)
	s.dead = append(s.dead, d)
	return d.Message.ID
}

func same(*inbox.DeadLetter) {}

func access(s *shelf) inbox.DeadLetters {
	return driver.NewDeadLetters(s, driver.DefaultRetention, slog.New(slog.DiscardHandler))
}

func waiting(s *shelf) inbox.DeadLetters {
	return driver.NewRetrying(s, driver.DefaultRetention, slog.New(slog.DiscardHandler))
}

func TestFilter(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	var s shelf
	id := s.put(func(d *inbox.DeadLetter) {
		d.Message.Name, d.Message.Key, d.FailedAt, d.Error, d.Fingerprint = "a", "ada", now, "Connection refused", "0123456789abcdef"
	})
	for name, tt := range map[string]struct {
		filter inbox.Filter
		want   int
	}{
		"zero":              {inbox.Filter{}, 1},
		"id":                {inbox.Filter{IDs: []uuid.UUID{ids.New(), id}}, 1},
		"other id":          {inbox.Filter{IDs: []uuid.UUID{ids.New()}}, 0},
		"class":             {inbox.Filter{Class: "default", Name: "a"}, 1},
		"other class":       {inbox.Filter{Class: "validation"}, 0},
		"other name":        {inbox.Filter{Name: "b"}, 0},
		"key":               {inbox.Filter{Key: "ada"}, 1},
		"other key":         {inbox.Filter{Key: "ad"}, 0},
		"from":              {inbox.Filter{FailedAfter: now}, 1},
		"later":             {inbox.Filter{FailedAfter: now.Add(1)}, 0},
		"until":             {inbox.Filter{FailedBefore: now}, 0},
		"before":            {inbox.Filter{FailedBefore: now.Add(1)}, 1},
		"no ids":            {inbox.Filter{IDs: []uuid.UUID{}}, 0},
		"error":             {inbox.Filter{ErrorContains: "connection R"}, 1},
		"other error":       {inbox.Filter{ErrorContains: "timeout"}, 0},
		"fingerprint":       {inbox.Filter{Fingerprint: "0123456789abcdef"}, 1},
		"other fingerprint": {inbox.Filter{Fingerprint: "0123456789abcdee"}, 0},
	} {
		if n, err := access(&s).Count(t.Context(), tt.filter); n != tt.want || err != nil {
			t.Errorf("%s: counted %d, error %v", name, n, err)
		}
	}
}

// A list has content only if asked for, and at most 32 MiB.
func TestList_boundsContentInBytes(t *testing.T) {
	t.Parallel()
	var s shelf
	body, headers := make([]byte, 10<<20), map[string]string{"tenant": "a"}
	for range 6 {
		s.put(func(d *inbox.DeadLetter) { d.Message.Body, d.Message.Headers = body, headers })
	}
	for whole, want := range map[bool]int{false: 0, true: 3} {
		found, err := access(&s).List(t.Context(), inbox.Filter{Whole: whole})
		n := 0
		for _, d := range found {
			if d.Omitted != (d.Message.Body == nil && d.Message.Headers == nil) {
				t.Errorf("whole %v: omitted %v of a body of %d bytes", whole, d.Omitted, len(d.Message.Body))
			}
			if !d.Omitted {
				n++
			}
		}
		if len(found) != 6 || n != want || err != nil {
			t.Errorf("whole %v: %d letters, %d of them whole, want %d, error %v", whole, len(found), n, want, err)
		}
	}
	if d, err := access(&s).Show(t.Context(), s.dead[5].Message.ID); len(d.Message.Body) != len(body) || err != nil {
		t.Errorf("shown with %d bytes, error %v", len(d.Message.Body), err)
	}
}

// A negative limit, such as a computed one that fell below zero, selects nothing.
func TestLimit(t *testing.T) {
	t.Parallel()
	var s shelf
	for i := range 5 {
		s.put(func(d *inbox.DeadLetter) { d.Class = []string{"a", "b"}[i%2] })
	}
	l := access(&s)
	if found, err := l.List(t.Context(), inbox.Filter{Limit: 4}); len(found) != 4 || err != nil {
		t.Errorf("listed %d, error %v", len(found), err)
	}
	if n, err := l.Remove(t.Context(), inbox.Filter{Limit: 4}, inbox.Removal{By: "test"}); n != 4 || err != nil || len(s.dead) != 1 {
		t.Errorf("removed %d, error %v", n, err)
	}
	for _, wrong := range []inbox.Filter{{Limit: -1}, {After: "1"}} {
		_, listing := l.List(t.Context(), wrong)
		_, grouping := l.Groups(t.Context(), wrong)
		_, removal := l.Remove(t.Context(), wrong, inbox.Removal{By: "test"})
		_, replay := l.Replay(t.Context(), wrong, inbox.Replay{By: "test"})
		if listing == nil || grouping == nil || removal == nil || replay == nil || len(s.dead) != 1 {
			t.Errorf("%+v: %v, %v, %v, %v, %d dead letters left", wrong, listing, grouping, removal, replay, len(s.dead))
		}
	}
}

func TestShow(t *testing.T) {
	t.Parallel()
	var s shelf
	id := s.put(func(d *inbox.DeadLetter) { d.Error, d.FailedAt = "latest", time.Now().Add(time.Hour) })
	s.put(func(d *inbox.DeadLetter) { d.Message.ID, d.Error = id, "earlier" })
	if d, err := access(&s).Show(t.Context(), id); err != nil || d.Error != "latest" {
		t.Errorf("%+v, error %v", d, err)
	}
	if _, err := access(&s).Show(t.Context(), ids.New()); !errors.Is(err, inbox.ErrNotFound) {
		t.Errorf("an unknown id: %v", err)
	}
	s.broken = errShut
	if _, err := access(&s).Show(t.Context(), id); !errors.Is(err, errShut) {
		t.Errorf("error %v", err)
	}
}

// A call visits all dead letters it can see and returns ErrHeld, unless it found everything it looked for.
func TestPartOfTheLetters(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		parked := shelf{}
		s := shelf{held: "a"}
		ofClass := func(s *shelf, class string) uuid.UUID {
			return s.put(func(d *inbox.DeadLetter) { d.Class, d.Message.ID = class, ids.New() })
		}
		ofClass(&parked, "a")
		later := ofClass(&s, "b")
		l := driver.NewDeadLetters(driver.JoinDeadLetters(&s, &parked), driver.DefaultRetention, slog.New(slog.DiscardHandler))
		for name, tt := range map[string]struct {
			filter inbox.Filter
			want   int
			part   bool
		}{
			"all":                {inbox.Filter{}, 2, true},
			"as many as wanted":  {inbox.Filter{Limit: 2}, 2, false},
			"fewer than wanted":  {inbox.Filter{Limit: 3}, 2, true},
			"the id":             {inbox.Filter{IDs: []uuid.UUID{later}}, 1, false},
			"an id that is held": {inbox.Filter{IDs: []uuid.UUID{ids.New()}}, 0, true},
		} {
			wants := func(what string, n int, err error) {
				t.Helper()
				if n != tt.want || errors.Is(err, inbox.ErrHeld) != tt.part || !tt.part && err != nil {
					t.Errorf("%s of %s: %d, error %v", what, name, n, err)
				}
			}
			found, err := l.List(t.Context(), tt.filter)
			wants("list", len(found), err)
			n, err := l.Count(t.Context(), tt.filter)
			wants("count", n, err)
			dry, err := l.Replay(t.Context(), tt.filter, inbox.Replay{DryRun: true})
			wants("dry run", dry.Returned, err)
		}
		if groups, err := l.Groups(t.Context(), inbox.Filter{}); len(groups) == 0 || !errors.Is(err, inbox.ErrHeld) {
			t.Errorf("groups: %+v, error %v", groups, err)
		}
		if d, err := l.Show(t.Context(), later); d.Message.ID != later || err != nil {
			t.Errorf("show: %+v, error %v", d, err)
		}
		if _, err := l.Show(t.Context(), ids.New()); !errors.Is(err, inbox.ErrHeld) {
			t.Errorf("show of one that may be held: %v", err)
		}
		if n, err := l.Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "test"}); n.Returned != 2 || !errors.Is(err, inbox.ErrHeld) {
			t.Errorf("replay: %+v, error %v", n, err)
		}
		if n, err := l.Remove(t.Context(), inbox.Filter{}, inbox.Removal{By: "test"}); n != 0 || !errors.Is(err, inbox.ErrHeld) {
			t.Errorf("remove: %d, error %v", n, err)
		}
	})
}

// The ids of a filter are found when each was seen once, whatever the number of copies and their outcome.
func TestErrHeld_notReturnedOnceAllIDsAreFound(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := shelf{held: "a"}
		id := s.put(same)
		s.put(func(d *inbox.DeadLetter) { d.Message.ID = id })
		old := s.put(func(d *inbox.DeadLetter) { d.Message.ID = ids.Deterministic(time.Now().AddDate(-1, 0, 0), "old") })
		for name, tt := range map[string]struct {
			ids      []uuid.UUID
			returned int
			part     bool
		}{
			"two copies of one of two": {[]uuid.UUID{id, ids.New()}, 2, true},
			"one id twice":             {[]uuid.UUID{id, id, id}, 2, false},
			"one that is rejected":     {[]uuid.UUID{old}, 0, false},
		} {
			got, err := access(&s).Replay(t.Context(), inbox.Filter{IDs: tt.ids}, inbox.Replay{DryRun: true})
			if got.Returned != tt.returned || errors.Is(err, inbox.ErrHeld) != tt.part {
				t.Errorf("%s: %+v, error %v", name, got, err)
			}
		}
	})
}

// A replay returns no message that failed again, even if another session held dead letters that were not counted.
func TestReplay_boundedWhileAnotherSessionHolds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := shelf{held: "b"}
		s.put(func(d *inbox.DeadLetter) { d.Class = "a" })
		s.onReturn = func(d inbox.DeadLetter) {
			d.Message.Replays++
			s.put(func(again *inbox.DeadLetter) { again.Message, again.Class = d.Message, "b" })
		}
		got, err := access(&s).Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "test"})
		if got.Returned != 1 || !errors.Is(err, inbox.ErrHeld) {
			t.Errorf("%+v, error %v", got, err)
		}
	})
}

// growing gets dead letters between a count and a scan.
type growing struct{ *shelf }

func (g growing) Scan(
	ctx context.Context, class string, visit func(*inbox.DeadLetter) (driver.Outcome, error), failed func(inbox.DeadLetter, error),
) error {
	for range 3 {
		g.put(func(d *inbox.DeadLetter) { d.Message.ID = ids.New() })
	}
	return g.shelf.Scan(ctx, class, visit, failed)
}

// Dead letters that one partition gets during a call do not hide those of the next one.
func TestDeadLetters_arriveDuringACall(t *testing.T) {
	t.Parallel()
	var first, second shelf
	first.put(same)
	id := second.put(func(d *inbox.DeadLetter) { d.Message.ID = ids.New() })
	l := driver.NewDeadLetters(driver.JoinDeadLetters(growing{&first}, &second), driver.DefaultRetention, slog.New(slog.DiscardHandler))
	if d, err := l.Show(t.Context(), id); d.Message.ID != id || err != nil {
		t.Errorf("show: %v", err)
	}
	one := inbox.Filter{IDs: []uuid.UUID{id}}
	if found, err := l.List(t.Context(), one); len(found) != 1 || err != nil {
		t.Errorf("list: %d, %v", len(found), err)
	}
	if got, err := l.Replay(t.Context(), one, inbox.Replay{By: "test"}); got.Returned != 1 || err != nil {
		t.Errorf("replay: %+v, %v", got, err)
	}
}

// A replay returns each copy of a message.
func TestReplay_copies(t *testing.T) {
	t.Parallel()
	var s shelf
	id := s.put(same)
	s.put(func(d *inbox.DeadLetter) { d.Class, d.Message.ID = "payment", id })
	if got, err := access(&s).Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "test"}); got.Returned != 2 || err != nil {
		t.Errorf("%+v, %v", got, err)
	}
}

// A replay waits for another session that is about to end.
func TestReplay_waitsForAnotherSession(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := shelf{held: driver.ClassDefault}
		asked := 0
		s.onDepths = func() {
			if asked++; asked == 3 {
				s.held = ""
				s.put(same)
			}
		}
		if got, err := access(&s).Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "test"}); got.Returned != 1 || err != nil {
			t.Errorf("%+v, error %v", got, err)
		}
	})
}

// Dead letters that cannot be returned count as failed, and not towards the limit.
func TestReplay_failedDoNotCountTowardsLimit(t *testing.T) {
	t.Parallel()
	var s shelf
	s.put(func(d *inbox.DeadLetter) { d.Message.Queue = "" })
	s.refuse = s.put(same)
	s.put(same)
	s.put(same)
	filter := inbox.Filter{Limit: 2}
	if got, err := access(&s).Replay(t.Context(), filter, inbox.Replay{DryRun: true}); got != (inbox.Replayed{Returned: 2, Failed: 1}) || err == nil {
		t.Errorf("dry run: %+v, error %v", got, err)
	}
	got, err := access(&s).Replay(t.Context(), filter, inbox.Replay{By: "test"})
	if got != (inbox.Replayed{Returned: 2, Failed: 2}) || err == nil || len(s.dead) != 2 || len(s.returned) != 2 {
		t.Errorf("%+v, error %v, %d left", got, err, len(s.dead))
	}
	if n, err := access(&s).Remove(t.Context(), inbox.Filter{}, inbox.Removal{By: "test"}); n != 1 || !errors.Is(err, errShut) {
		t.Errorf("removed %d, error %v", n, err)
	}
}

// A message that fails again during the replay is not returned twice, even if its class comes later.
func TestReplayIsBounded(t *testing.T) {
	t.Parallel()
	var s shelf
	s.put(same)
	s.put(same)
	s.put(func(d *inbox.DeadLetter) { d.Class = "payment" })
	s.onReturn = func(d inbox.DeadLetter) {
		d.Class = "payment"
		d.Message.Replays++
		s.dead = append(s.dead, d)
	}
	if got, err := access(&s).Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "test"}); got.Returned != 3 || err != nil || len(s.dead) != 3 {
		t.Errorf("%+v, error %v, %d left", got, err, len(s.dead))
	}
}

// A message with an id derived by its consumer may also have been processed already.
func TestReplayRefuses(t *testing.T) {
	t.Parallel()
	now := time.Now()
	old := now.Add(-9 * 24 * time.Hour)
	for name, tc := range map[string]struct {
		id     uuid.UUID
		failed time.Time
		want   bool
		sent   time.Time
	}{
		"fresh":                             {ids.Deterministic(now, "a"), now, false, time.Time{}},
		"old":                               {ids.Deterministic(old, "a"), now, true, time.Time{}},
		"old by its stamp":                  {ids.Deterministic(old, "a"), now, true, old},
		"a deadline long ago, sent now":     {ids.Deterministic(old, "a"), now, false, now},
		"a deadline to come, sent long ago": {ids.Deterministic(now.Add(time.Hour), "a"), now, true, old},
		"sent in the future":                {ids.Deterministic(now, "a"), old, true, now.Add(1000 * time.Hour)},
		"no id, fresh":                      {uuid.Nil, now, false, time.Time{}},
		"no id, failed long ago":            {uuid.Nil, old, true, time.Time{}},
		"of version 4, failed long ago":     {uuid.MustParse("9d1a1a0e-3a68-4f8c-9a3e-0d1a3c0f6a11"), old, true, time.Time{}},
		"no id, and nobody knows how long":  {uuid.Nil, time.Time{}, false, time.Time{}},
	} {
		var s shelf
		s.put(func(d *inbox.DeadLetter) {
			d.Message.ID, d.FirstFailedAt, d.Message.PublishedAt = tc.id, tc.failed, tc.sent
		})
		got, err := access(&s).Replay(t.Context(), inbox.Filter{}, inbox.Replay{DryRun: true})
		if errors.Is(err, inbox.ErrOutlived) != tc.want || got.Outlived == 1 != tc.want {
			t.Errorf("%s: %+v, error %v", name, got, err)
		}
		if got, err := access(&s).Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "test", Force: true}); got.Returned != 1 || err != nil {
			t.Errorf("%s, by force: %+v, error %v", name, got, err)
		}
	}
}

func TestReplayPause(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var s shelf
		for range 5 {
			s.put(same)
		}
		begun := time.Now()
		if got, err := access(&s).Replay(t.Context(), inbox.Filter{Limit: 3}, inbox.Replay{By: "test", PerSecond: 4}); got.Returned != 3 || err != nil {
			t.Errorf("%+v, error %v", got, err)
		}
		if took := time.Since(begun); took != 500*time.Millisecond {
			t.Errorf("3 at 4 per second took %v", took)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 24*time.Hour)
		defer cancel()
		if got, err := access(&s).Replay(ctx, inbox.Filter{}, inbox.Replay{By: "test", PerSecond: 1e-300, Force: true}); got.Returned != 1 || err == nil {
			t.Errorf("next to nothing per second: %+v, error %v", got, err)
		}
		if len(s.dead) != 1 {
			t.Errorf("%d letters left", len(s.dead))
		}
	})
	if _, err := access(&shelf{}).Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "test", PerSecond: -1}); err == nil {
		t.Error("a negative rate was accepted")
	}
}

// A rate of waiting messages sets their due times. It does not prolong the scan, in which RabbitMQ delivers none.
func TestReplay_spreadsWaiting(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var s shelf
		for range 3 {
			s.put(func(d *inbox.DeadLetter) { d.Class = driver.WaitingRetry })
		}
		var due []time.Duration
		begun := time.Now()
		s.onReturn = func(d inbox.DeadLetter) { due = append(due, d.DueAt.Sub(begun)) }
		got, err := waiting(&s).Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "test", PerSecond: 2, Delay: time.Minute})
		if got.Returned != 3 || err != nil {
			t.Errorf("%+v, error %v", got, err)
		}
		want := []time.Duration{time.Minute, time.Minute + time.Second/2, time.Minute + time.Second}
		if took := time.Since(begun); took != 0 || !slices.Equal(due, want) {
			t.Errorf("due after %v, want %v; the scan took %v", due, want, took)
		}
	})
}

// A waiting message that fails again during a replay is not moved a second time. It would use up its attempts.
func TestReplay_movesWaitingOnce(t *testing.T) {
	t.Parallel()
	var s shelf
	s.put(func(d *inbox.DeadLetter) { d.Class = driver.WaitingPutOff })
	s.put(func(d *inbox.DeadLetter) { d.Class = driver.WaitingRetry })
	s.onReturn = func(d inbox.DeadLetter) {
		d.Class, d.Attempts = driver.WaitingRetry, d.Attempts+1
		s.dead = append(s.dead, d)
	}
	if got, err := waiting(&s).Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "test"}); got.Returned != 2 || len(s.dead) != 2 || err != nil {
		t.Errorf("%+v, %d wait, error %v", got, len(s.dead), err)
	}
}

func TestReplay_reportsProgress(t *testing.T) {
	t.Parallel()
	var s shelf
	for range 2 {
		s.put(same)
	}
	s.put(func(d *inbox.DeadLetter) { d.Message.Queue = "" })
	var told []inbox.Replayed
	how := inbox.Replay{By: "test", Progress: func(r inbox.Replayed) { told = append(told, r) }}
	if _, err := access(&s).Replay(t.Context(), inbox.Filter{}, how); err == nil {
		t.Error("a message without a queue: no error")
	}
	if want := []inbox.Replayed{{Returned: 1}, {Returned: 2}, {Returned: 2, Failed: 1}}; !slices.Equal(told, want) {
		t.Errorf("told %+v, want %+v", told, want)
	}
}

func TestGroups(t *testing.T) {
	t.Parallel()
	begin := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	var s shelf
	for i := range 7 {
		s.put(func(d *inbox.DeadLetter) {
			d.FailedAt = begin.Add(time.Duration(i%5) * time.Minute)
			d.Error = fmt.Sprintf("seat %d is %s", i, []string{"taken", "gone"}[i%2])
			d.Message.Body, d.Message.Headers = []byte("{}"), map[string]string{"tenant": "a"}
		})
	}
	l := access(&s)
	all, err := l.Groups(t.Context(), inbox.Filter{})
	if err != nil || len(all) != 2 {
		t.Fatalf("%d groups, error %v", len(all), err)
	}
	taken, gone := all[0], all[1]
	if taken.Count != 4 || gone.Count != 3 || taken.Fingerprint == gone.Fingerprint || taken.Fingerprint == "" {
		t.Errorf("groups %+v", all)
	}
	if !taken.First.Equal(begin) || !taken.Last.Equal(begin.Add(4*time.Minute)) || taken.Sample.Error != "seat 4 is taken" ||
		taken.Sample.Fingerprint != taken.Fingerprint || taken.Sample.Message.Body != nil || taken.Sample.Message.Headers != nil {
		t.Errorf("the larger group is %+v", taken)
	}
	if some, err := l.Groups(t.Context(), inbox.Filter{Limit: 1, ErrorContains: "gone"}); err != nil || len(some) != 1 || some[0].Count != 3 {
		t.Errorf("of a filter: %+v, error %v", some, err)
	}
	of := inbox.Filter{Fingerprint: taken.Fingerprint}
	if got, err := l.Replay(t.Context(), of, inbox.Replay{DryRun: true}); got.Returned != 4 || err != nil {
		t.Errorf("dry run of a group: %+v, error %v", got, err)
	}
	if n, err := l.Remove(t.Context(), of, inbox.Removal{By: "test"}); n != 4 || err != nil || len(s.dead) != 3 {
		t.Errorf("removed %d of a group, error %v", n, err)
	}
}

// Fingerprints come from outside, so their number is bounded.
func TestGroupsAreBounded(t *testing.T) {
	t.Parallel()
	var s shelf
	for i := range 1500 {
		s.put(func(d *inbox.DeadLetter) { d.Fingerprint = fmt.Sprintf("%016x", i) })
	}
	s.put(func(d *inbox.DeadLetter) { d.Fingerprint = strings.Repeat("f", 1<<20) })
	s.put(func(d *inbox.DeadLetter) { d.Fingerprint = fmt.Sprintf("%016X", 0xabc) })
	all, err := access(&s).Groups(t.Context(), inbox.Filter{})
	if err != nil || len(all) != 1001 || all[0].Count != 502 || all[0].Fingerprint != "" {
		t.Fatalf("%d groups, the first %+v, error %v", len(all), all[0], err)
	}
}

func TestChangesAreRecorded(t *testing.T) {
	t.Parallel()
	var s shelf
	s.put(same)
	s.put(same)
	var log strings.Builder
	l := driver.NewDeadLetters(&s, driver.DefaultRetention, slog.New(slog.NewTextHandler(&log, nil)))
	if _, err := l.Replay(t.Context(), inbox.Filter{}, inbox.Replay{DryRun: true}); err != nil || log.String() != "" {
		t.Fatalf("a dry run: %v, log %q", err, log.String())
	}
	if _, err := l.Replay(t.Context(), inbox.Filter{Limit: 1}, inbox.Replay{By: "ann", Reason: "fixed"}); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Remove(t.Context(), inbox.Filter{Class: "default"}, inbox.Removal{By: "bob"}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`msg="dead letters returned" by=ann reason=fixed filter.limit=1 returned=1 outlived=0 failed=0`,
		`msg="dead letters removed" by=bob reason="" filter.class=default removed=1`,
	} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("no %s in\n%s", want, log.String())
		}
	}
	remove := func(by, reason string) error {
		_, err := l.Remove(t.Context(), inbox.Filter{}, inbox.Removal{By: by, Reason: reason})
		return err
	}
	replay := func(how inbox.Replay) error {
		_, err := l.Replay(t.Context(), inbox.Filter{}, how)
		return err
	}
	for name, err := range map[string]error{
		"nobody removes":      remove("", ""),
		"nobody returns":      replay(inbox.Replay{}),
		"two lines":           remove("a\nb", ""),
		"a very long reason":  replay(inbox.Replay{By: "a", Reason: strings.Repeat("r", 1001)}),
		"a name of 129 bytes": remove(strings.Repeat("a", 129), ""),
	} {
		if err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
