package inboxpgx_test

import (
	"errors"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
)

// The counts are those of one consumer, of a time and of a key.
func TestCounts(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	parkAt(t, pool, "a", "ada", time.Hour)
	parkAt(t, pool, "b", "bob", time.Hour)
	_, err := pool.Exec(t.Context(), `INSERT INTO holdfast_inbox (consumer, message_id, processed_at)
		SELECT c, gen_random_uuid(), now() - age FROM unnest(ARRAY['a', 'a', 'a', 'b'], ARRAY['1 s', '2 s', '1 hour', '1 s']::interval[]) AS m (c, age)`)
	noError(t, err)
	s := newStore(t, newManager(t, pool), "a", inboxpgx.Config{})
	if n, err := s.Processed(t.Context(), time.Minute); n != 2 || err != nil {
		t.Errorf("%d processed in a minute, %v, want 2", n, err)
	}
	for key, want := range map[string]int{"ada": 1, "bob": 0} {
		if n, err := s.Behind(t.Context(), key); n != want || err != nil {
			t.Errorf("%d behind the letter of %s, %v, want %d", n, key, err, want)
		}
	}
	fake, _ := fakeStore(t)
	noError(t, inboxpgx.Handle(fake, conformance.Name, noEffect))
	noError(t, errors.Join(fake.Process(t.Context(), []*inbox.Message{event(), event()})...))
	if n, err := fake.Processed(t.Context(), time.Minute); n != 2 || err != nil {
		t.Errorf("in memory %d processed in a minute, %v, want 2", n, err)
	}
	if n, err := fake.Behind(t.Context(), "ada"); n != 0 || err != nil {
		t.Errorf("in memory %d behind a letter, %v", n, err)
	}
}
