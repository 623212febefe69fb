package ids_test

import (
	"errors"
	"os"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func TestParse(t *testing.T) {
	t.Parallel()
	good := ids.New()
	if got, err := ids.Parse(good.String()); err != nil || got != good {
		t.Fatalf("Parse(%s) = %s, %v", good, got, err)
	}
	for name, in := range map[string]string{
		"empty":         "",
		"version 4":     uuid.NewString(),
		"nil":           uuid.Nil.String(),
		"urn":           "urn:uuid:" + good.String(),
		"braces":        "{" + good.String() + "}",
		"no hyphens":    "019da3b27c4d7e8fa1b2c3d4e5f60718",
		"not hex":       "019da3b2-7c4d-7e8f-a1b2-c3d4e5f6071g",
		"other variant": "019da3b2-7c4d-7e8f-c1b2-c3d4e5f60718",
	} {
		if _, err := ids.Parse(in); !errors.Is(err, ids.ErrNotV7) {
			t.Errorf("%s: Parse(%q) error = %v, want ErrNotV7", name, in, err)
		}
	}
}

func TestDeterministic(t *testing.T) {
	t.Parallel()
	at := time.UnixMilli(1_789_000_000_123)
	id := ids.Deterministic(at, "reservation.expired", "42")
	if err := ids.Check(id); err != nil {
		t.Fatal(err)
	}
	if got := ids.Time(id); !got.Equal(at) {
		t.Errorf("time of %s = %v, want %v", id, got, at)
	}
	if again := ids.Deterministic(at, "reservation.expired", "42"); again != id {
		t.Errorf("second call gave %s, first %s", again, id)
	}
	others := map[uuid.UUID]string{id: "first"}
	for name, other := range map[string]uuid.UUID{
		"other row":      ids.Deterministic(at, "reservation.expired", "43"),
		"other split":    ids.Deterministic(at, "reservation.expired4", "2"),
		"other deadline": ids.Deterministic(at.Add(time.Microsecond), "reservation.expired", "42"),
	} {
		if first, seen := others[other]; seen {
			t.Errorf("%s has the id of %s", name, first)
		}
		others[other] = name
	}
}
