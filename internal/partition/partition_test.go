package partition_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/holdfast-go/holdfast/internal/partition"
)

// The expected values come from zlib.crc32 in Python and crc32 in PHP, because other languages also
// write messages.
func TestOf(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		key, id string
		n, want int
	}{
		{"customer-7", "", 4, 0},
		{"customer-7", "", 64, 8},
		{"customer-7", "0198a7a4-0000-7000-8000-000000000001", 64, 8},
		{"Zürich", "", 64, 62},
		{"", "0198a7a4-0000-7000-8000-000000000001", 64, 21},
		{"customer-7", "", 1, 0},
		{"customer-7", "", 0, 0},
	} {
		if got := partition.Of(tt.key, tt.id, tt.n); got != tt.want {
			t.Errorf("Of(%q, %q, %d) = %d, want %d", tt.key, tt.id, tt.n, got, tt.want)
		}
	}
}

// Similar keys are spread over the partitions.
func TestOfSpreads(t *testing.T) {
	t.Parallel()
	for _, form := range []string{"customer-%d", "%d", "%036d"} {
		for _, n := range []int{2, 3, 4, 16, 64} {
			counts := make([]int, n)
			for i := range 1000 * n {
				counts[partition.Of(fmt.Sprintf(form, i), "", n)]++
			}
			if least, most := slices.Min(counts), slices.Max(counts); least < 700 || most > 1300 {
				t.Errorf("%s over %d partitions: from %d to %d keys", form, n, least, most)
			}
		}
	}
}

func TestNames(t *testing.T) {
	t.Parallel()
	for n, want := range map[int]string{0: "[orders]", 1: "[orders]", 3: "[orders.0 orders.1 orders.2]"} {
		if got := fmt.Sprint(partition.Names("orders", n)); got != want {
			t.Errorf("%d partitions: %s", n, got)
		}
	}
	for n, good := range map[int]bool{-1: false, 0: true, 64: true, 65: false} {
		if err := partition.Check(n); (err == nil) != good {
			t.Errorf("%d partitions: %v", n, err)
		}
	}
}

func TestSlot(t *testing.T) {
	t.Parallel()
	for key, want := range map[string]string{"customer-7": "holdfast.slot.8", "Zürich": "holdfast.slot.62", "": "holdfast.slot.0"} {
		if got := partition.Slot(key); got != want {
			t.Errorf("the slot of %q is %s, want %s", key, got, want)
		}
	}
	for slot := range partition.Slots {
		if !partition.IsSlot(partition.SlotName(slot)) {
			t.Errorf("%s is none", partition.SlotName(slot))
		}
	}
	for _, name := range []string{"", "orders", "holdfast.slot.", "holdfast.slot.64", "holdfast.slot.07", "holdfast.slot.-1"} {
		if partition.IsSlot(name) {
			t.Errorf("%q is one", name)
		}
	}
}
