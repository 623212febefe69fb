package booking_test

import (
	"os"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestSeatNames(t *testing.T) {
	t.Parallel()
	for number, want := range map[int]string{
		1: "A1", 10: "A10", 11: "B1", 50: "E10", 260: "Z10", 261: "AA1", 7020: "ZZ10", 7021: "AAA1", booking.MaxSeats: "ALL10",
	} {
		if got := booking.SeatName(number); got != want {
			t.Errorf("seat %d is called %s, want %s", number, got, want)
		}
	}
	for number := 1; number <= booking.MaxSeats; number++ {
		if got, ok := booking.SeatNumber(booking.SeatName(number)); !ok || got != number {
			t.Fatalf("%s is seat %d (%v), want %d", booking.SeatName(number), got, ok, number)
		}
	}
}

func TestSeatNumber_rejectsOtherNames(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"", "A", "1", "A0", "A11", "A01", "A+1", "a1", "A1 ", "1A", "ALM1", "ZZZ10", "ZZZZZZZZZZZZZZ1", "Ä1", "A1\x00"} {
		if number, ok := booking.SeatNumber(name); ok {
			t.Errorf("%q is seat %d", name, number)
		}
	}
}

func FuzzSeatNumber(f *testing.F) {
	f.Add("A1")
	f.Add("ALL10")
	f.Fuzz(func(t *testing.T, name string) {
		number, ok := booking.SeatNumber(name)
		if ok && (number < 1 || number > booking.MaxSeats || booking.SeatName(number) != name) {
			t.Errorf("%q is seat %d, which is called %q", name, number, booking.SeatName(number))
		}
	})
}

func TestOverdueHoldsCountAsOver(t *testing.T) {
	t.Parallel()
	deadline := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	seat := booking.Seat{State: booking.SeatHeld, HeldUntil: deadline}
	held := booking.Reservation{Status: booking.StatusHeld, ExpiresAt: deadline}
	before := deadline.Add(-time.Microsecond)
	if seat.StateAt(before) != booking.SeatHeld || held.StatusAt(before) != booking.StatusHeld {
		t.Error("a hold is over before its deadline")
	}
	if seat.StateAt(deadline) != booking.SeatFree || held.StatusAt(deadline) != booking.StatusExpired {
		t.Error("a hold is not over at its deadline")
	}
	confirmed := booking.Reservation{Status: booking.StatusConfirmed, ExpiresAt: deadline}
	if confirmed.StatusAt(deadline) != booking.StatusConfirmed {
		t.Error("a confirmed reservation expired")
	}
}

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }
