package audit_test

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/internal/lab/harness/audit"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// sound is a correct history: one reservation was confirmed, one cancelled, and one of the same seat expired.
type sound struct{ audit.History }

func newSound() *sound {
	h := &sound{audit.History{Events: []string{"e"}}}
	h.answer("e", "key-e", 201, "e", "", "", nil)
	h.hold("r1", 1)
	h.answer("read", "", 200, "e", "r1", audit.Held, []int{1})
	h.settle("r1", 1, audit.Confirmed)
	h.answer("confirm", "key-r1-c", 200, "e", "r1", audit.Confirmed, []int{1})
	h.answer("read", "", 200, "e", "r1", audit.Confirmed, []int{1})
	h.Seats = append(h.Seats, audit.Seat{Event: "e", State: audit.Confirmed, Reservation: "r1", Number: 1})
	h.hold("r2", 2)
	h.settle("r2", 2, audit.Cancelled)
	h.answer("cancel", "key-r2-c", 200, "e", "r2", audit.Cancelled, []int{2})
	h.hold("r3", 2)
	h.settle("r3", 2, audit.Expired)
	h.refusal("confirm", "key-r3-c", 409, "RESERVATION_EXPIRED", "r3")
	h.Answers[0].Op = audit.OpEvent
	return h
}

func (h *sound) answer(op, key string, status int, event, reservation, state string, seats []int) {
	body := fmt.Sprint(status, reservation, state)
	h.Answers = append(h.Answers, audit.Answer{Op: op, Key: key, Status: status, Event: event, Reservation: reservation, State: state, Seats: seats, Body: body})
}

func (h *sound) refusal(op, key string, status int, code, reservation string) {
	h.answer(op, key, status, "e", reservation, "", nil)
	h.Answers[len(h.Answers)-1].Code = code
}

func (h *sound) change(c audit.Change) {
	c.ID, c.Token, c.Event = int64(len(h.Changes)+1), uuid.New(), "e"
	h.Changes = append(h.Changes, c)
}

func (h *sound) hold(id string, seat int) {
	h.answer("hold", "key-"+id, 503, "e", "", "", nil)
	h.answer("hold", "key-"+id, 201, "e", id, audit.Held, []int{seat})
	h.change(audit.Change{What: audit.OfSeat, Seat: seat, Status: audit.Held, Reservation: id})
	h.change(audit.Change{What: audit.OfReservation, Reservation: id, Status: audit.Held, User: "key-" + id, Seats: []int{seat}})
	h.tell(id)
	h.Reservations = append(h.Reservations, audit.Reservation{ID: id, Event: "e", User: "key-" + id, Seats: []int{seat}})
}

func (h *sound) settle(id string, seat int, status string) {
	to := audit.Change{What: audit.OfSeat, Seat: seat, Status: "free"}
	if status == audit.Confirmed {
		to.Status, to.Reservation = audit.Confirmed, id
	}
	h.change(audit.Change{What: audit.OfReservation, Reservation: id, Status: status, User: "key-" + id})
	h.change(to)
	h.tell(id)
	r := &h.Reservations[len(h.Reservations)-1]
	r.Status, r.Known, r.Messages = status, status, 2
}

// tell writes a message and records its effect.
func (h *sound) tell(id string) {
	message := uuid.New()
	h.change(audit.Change{What: audit.OfMessage, Message: message, Reservation: id})
	h.change(audit.Change{What: audit.OfTaken, Message: message})
	h.change(audit.Change{What: audit.OfEffect, Reservation: id})
}

// without removes and returns the last change of a kind for a reservation.
func (h *sound) without(what, id string) audit.Change {
	for i, c := range slices.Backward(h.Changes) {
		if c.What == what && (c.Reservation == id || c.Message == h.message(id)) {
			h.Changes = slices.Delete(h.Changes, i, i+1)
			return c
		}
	}
	panic(what)
}

// message returns the last message of a reservation.
func (h *sound) message(id string) uuid.UUID {
	for _, c := range slices.Backward(h.Changes) {
		if c.What == audit.OfMessage && c.Reservation == id {
			return c.Message
		}
	}
	return uuid.UUID{}
}

func (h *sound) row(id string) *audit.Reservation {
	return &h.Reservations[slices.IndexFunc(h.Reservations, func(r audit.Reservation) bool { return r.ID == id })]
}

func (h *sound) told(op, id string) *audit.Answer {
	return &h.Answers[slices.IndexFunc(h.Answers, func(a audit.Answer) bool { return a.Op == op && a.Reservation == id })]
}

func TestCheck_acceptsACorrectHistory(t *testing.T) {
	t.Parallel()
	if r := audit.Check(newSound().History); len(r.Findings) > 0 {
		t.Errorf("%+v", r.Findings)
	}
}

// TestCheck_findsBrokenPromises breaks each promise and expects the finding.
func TestCheck_findsBrokenPromises(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		sabotage func(h *sound)
		want     []string
	}{
		"a doubled holder": {func(h *sound) {
			h.row("r2").Status, h.row("r2").Seats = audit.Confirmed, []int{1}
		}, []string{audit.SoldTwice, audit.NotDurable, audit.TwoEffects, audit.WrongModel, audit.Unexplained}},
		"a seat that went from hand to hand": {func(h *sound) {
			h.change(audit.Change{What: audit.OfSeat, Seat: 1, Status: audit.Held, Reservation: "r9"})
		}, []string{audit.SoldTwice}},
		"a seat confirmed to two": {func(h *sound) {
			h.answer("confirm", "key-r9", 200, "e", "r9", audit.Confirmed, []int{1})
		}, []string{audit.SoldTwice, audit.NotDurable}},
		"a seat without its reservation": {func(h *sound) { h.Seats = nil }, []string{audit.SoldTwice}},
		"a lost hold": {func(h *sound) {
			h.Reservations = slices.DeleteFunc(h.Reservations, func(r audit.Reservation) bool { return r.ID == "r3" })
		}, []string{audit.NotDurable}},
		"a lost event":        {func(h *sound) { h.Events = nil }, []string{audit.NotDurable}},
		"a lost confirmation": {func(h *sound) { h.row("r1").Status = audit.Expired }, []string{audit.NotDurable, audit.SoldTwice, audit.TwoEffects, audit.WrongModel}},
		"a second answer": {func(h *sound) {
			h.answer("hold", "key-r2", 201, "e", "r2", audit.Held, []int{3})
			h.Answers[len(h.Answers)-1].Body = "another"
		}, []string{audit.TwoAnswers, audit.NotDurable}},
		"a refusal after the answer": {func(h *sound) {
			h.refusal("hold", "key-r2", 409, "SEATS_UNAVAILABLE", "")
		}, []string{audit.TwoAnswers, audit.Unexplained}},
		"a second effect": {func(h *sound) { h.row("r3").User = "key-r2" }, []string{audit.TwoEffects, audit.NotDurable}},
		"a second end": {func(h *sound) {
			h.change(audit.Change{What: audit.OfReservation, Reservation: "r3", Status: audit.Cancelled})
			h.tell("r3")
			*h.row("r3") = audit.Reservation{ID: "r3", Event: "e", User: "key-r3", Status: audit.Cancelled, Known: audit.Cancelled, Seats: []int{2}, Messages: 3}
		}, []string{audit.TwoEffects, audit.Unexplained}},
		"confirmed and cancelled": {
			func(h *sound) { h.answer("cancel", "key-x", 200, "e", "r1", audit.Cancelled, nil) },
			[]string{audit.Contradicts, audit.NotDurable},
		},
		"confirmed without a client": {func(h *sound) {
			*h.told("confirm", "r1") = audit.Answer{Op: "confirm", Key: "key-r1-c", Status: 409, Code: "RESERVATION_NOT_HELD", Event: "e", Reservation: "r1"}
		}, []string{audit.Unexplained}},
		"a read that goes back":  {func(h *sound) { h.answer("read", "", 200, "e", "r1", audit.Held, nil) }, []string{audit.Contradicts}},
		"an event without a key": {func(h *sound) { h.Events = append(h.Events, "e2") }, []string{audit.Unexplained}},
		"two events of one key without an answer": {func(h *sound) {
			h.answer("event", "key-e2", 0, "", "", "", nil)
			h.Events = append(h.Events, "e2", "e3")
		}, []string{audit.Unexplained}},
		"a message not written": {func(h *sound) {
			h.without(audit.OfTaken, "r2")
			h.without(audit.OfMessage, "r2")
		}, []string{audit.NotAnnounced}},
		"a message not delivered": {func(h *sound) {
			h.without(audit.OfTaken, "r2")
			h.without(audit.OfEffect, "r2")
			h.row("r2").Known, h.row("r2").Messages = audit.Held, 1
		}, []string{audit.NotDelivered, audit.WrongModel}},
		"a message taken twice": {func(h *sound) {
			h.change(audit.Change{What: audit.OfTaken, Message: h.message("r2")})
			h.change(audit.Change{What: audit.OfEffect, Reservation: "r2"})
			h.row("r2").Messages = 3
		}, []string{audit.EffectTwice}},
		"a message never written": {func(h *sound) { h.change(audit.Change{What: audit.OfTaken, Message: uuid.New()}) }, []string{audit.WrongModel}},
		"a hold that is due":      {func(h *sound) { h.Left.Due = 1 }, []string{audit.Stuck}},
		"a dead letter":           {func(h *sound) { h.Left.DeadInbox = 1 }, []string{audit.Stuck}},
		"a message left over":     {func(h *sound) { h.Left.Outbox = 1 }, []string{audit.Stuck}},
		"a key behind letters":    {func(h *sound) { h.Left.Parked = 1 }, []string{audit.Stuck}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newSound()
			c.sabotage(h)
			r := audit.Check(h.History)
			slices.Sort(c.want)
			if found := slices.Sorted(maps.Keys(r.Counts)); !slices.Equal(found, c.want) {
				t.Errorf("found %v, want %v: %+v", found, c.want, r.Findings)
			}
		})
	}
}

// Each operation allows its own set of answers.
func TestAnswersOfEachOperation(t *testing.T) {
	t.Parallel()
	type refusal struct {
		status int
		code   string
	}
	unavailable, limited, silent := refusal{503, "UNAVAILABLE"}, refusal{429, "RATE_LIMITED"}, refusal{}
	inUse, sold := refusal{409, "IDEMPOTENCY_KEY_IN_USE"}, refusal{409, "SEATS_UNAVAILABLE"}
	notHeld, expired := refusal{409, "RESERVATION_NOT_HELD"}, refusal{409, "RESERVATION_EXPIRED"}
	fitting := map[string][]refusal{
		audit.OpEvent:   {silent, unavailable, limited, inUse},
		audit.OpHold:    {silent, unavailable, limited, inUse, sold},
		audit.OpConfirm: {silent, unavailable, limited, inUse, notHeld, expired},
		audit.OpCancel:  {silent, unavailable, limited, inUse, notHeld, expired},
		audit.OpRead:    {silent, unavailable},
	}
	all := []refusal{silent, unavailable, limited, inUse, sold, notHeld, expired, {409, ""}, {409, "IDEMPOTENCY_RESULT_UNAVAILABLE"}}
	for _, status := range []int{204, 400, 401, 403, 404, 405, 413, 415, 422, 500, 502, 504} {
		all = append(all, refusal{status: status})
	}
	for op, those := range fitting {
		for _, r := range all {
			h := newSound()
			key, reservation := "key-x", "r3"
			if op == audit.OpRead {
				key = ""
			}
			if op == audit.OpEvent || op == audit.OpHold {
				reservation = ""
			}
			h.refusal(op, key, r.status, r.code, reservation)
			n := audit.Check(h.History).Counts[audit.Refused]
			if want := !slices.Contains(those, r); (n == 1) != want || n > 1 {
				t.Errorf("%s answered %d %s: found %d times", op, r.status, r.code, n)
			}
		}
	}
}

// The status of a success depends on the operation.
func TestStatusOfSuccess(t *testing.T) {
	t.Parallel()
	for i, a := range newSound().Answers {
		if a.Status != 200 && a.Status != 201 {
			continue
		}
		h := newSound()
		h.Answers[i].Status = 401 - a.Status
		if r := audit.Check(h.History); r.Counts[audit.Refused] != 1 {
			t.Errorf("%s answered %d: %+v", a.Op, 401-a.Status, r)
		}
	}
}

// A lost change, a clock that went back, or a request without an answer excuses the findings it explains, and no others.
func TestExcuses(t *testing.T) {
	t.Parallel()
	lost := func(h *sound, id, status string) {
		h.Lost = append(h.Lost, audit.Change{What: audit.OfReservation, Reservation: id, Status: status})
	}
	without := func(h *sound, id string) {
		h.Reservations = slices.DeleteFunc(h.Reservations, func(r audit.Reservation) bool { return r.ID == id })
	}
	for name, c := range map[string]struct {
		play    func(h *sound)
		found   string // the kind of the only finding
		excused string
	}{
		"a confirm of a lost reservation": {func(h *sound) { lost(h, "r9", audit.Held); h.answer(audit.OpConfirm, "key-x", 404, "e", "r9", "", nil) }, "", audit.Refused},
		"a read of a lost reservation":    {func(h *sound) { lost(h, "r9", audit.Held); h.answer(audit.OpRead, "", 404, "e", "r9", "", nil) }, "", audit.Refused},
		"a confirm of an existing reservation": {func(h *sound) {
			lost(h, "r2", audit.Cancelled)
			h.answer(audit.OpConfirm, "key-x", 404, "e", "r2", "", nil)
		}, audit.Refused, ""},
		"a wrong rejection of a lost reservation": {func(h *sound) { lost(h, "r9", audit.Held); h.answer(audit.OpRead, "", 403, "e", "r9", "", nil) }, audit.Refused, ""},
		"a hold of no event":                      {func(h *sound) { h.answer(audit.OpHold, "key-x", 404, "e9", "", "", nil) }, audit.Refused, ""},
		"a hold of a lost event": {func(h *sound) {
			h.Lost = []audit.Change{{What: audit.OfEvent, Event: "e9"}}
			h.answer(audit.OpHold, "key-x", 404, "e9", "", "", nil)
		}, "", audit.Refused},
		"a hold that is lost":   {func(h *sound) { lost(h, "r3", audit.Held); without(h, "r3") }, "", audit.NotDurable},
		"an event that is lost": {func(h *sound) { h.Lost = []audit.Change{{What: audit.OfEvent, Event: "e"}}; h.Events = nil }, "", audit.NotDurable},
		"an event without an answer": {func(h *sound) {
			h.answer(audit.OpEvent, "key-e2", 503, "", "", "", nil)
			h.Events = append(h.Events, "e2")
		}, "", ""},
		"an event beside its answer": {func(h *sound) {
			h.answer(audit.OpEvent, "key-e2", 201, "e2", "", "", nil)
			h.Events = append(h.Events, "e2", "e3")
		}, audit.Unexplained, ""},
		"expired, and then confirmed": {func(h *sound) { h.told(audit.OpRead, "r1").State = audit.Expired }, audit.NotDurable, ""},
		"the same, the clock went back": {func(h *sound) {
			h.told(audit.OpRead, "r1").State, h.ClockWentBack = audit.Expired, true
		}, "", ""},
	} {
		h := newSound()
		c.play(h)
		r := audit.Check(h.History)
		if c.found == "" && len(r.Findings) > 0 || c.found != "" && r.Counts[c.found] != 1 || c.excused != "" && r.Excused[c.excused] != 1 {
			t.Errorf("%s: found %+v, excused %v; want %q and %q", name, r.Findings, r.Excused, c.found, c.excused)
		}
	}
}

// asked returns n requests, one after the other, of equal duration.
func asked(n, status int, from time.Time, takes time.Duration) (all []audit.Asked) {
	for range n {
		all = append(all, audit.Asked{Sent: from, Answered: from.Add(takes), Status: status})
		from = from.Add(takes)
	}
	return all
}

func TestLimit(t *testing.T) {
	t.Parallel()
	minute := time.Date(2031, 5, 4, 12, 30, 0, 0, time.UTC)
	at := func(s int) time.Time { return minute.Add(time.Duration(s) * time.Second) }
	flush := audit.Forgotten{From: at(10), To: at(11), Times: 1}
	earlier := audit.Forgotten{From: at(-20), To: at(-10), Times: 1}
	over := audit.Forgotten{From: at(-20), To: at(10), Times: 1}
	later := audit.Forgotten{From: at(60), To: at(61), Times: 1}
	for name, c := range map[string]struct {
		asked     []audit.Asked
		forgotten []audit.Forgotten
		want      string
	}{
		"as many as there may be":              {asked: asked(5, audit.StatusAdmitted, at(1), time.Second)},
		"one more":                             {asked: asked(6, audit.StatusAdmitted, at(1), time.Second), want: audit.OverLimit},
		"denied, undecided and not answered":   {asked: append(asked(6, audit.StatusDenied, at(1), 1), append(asked(6, audit.StatusUndecided, at(1), 1), asked(6, 0, at(1), 1)...)...)},
		"as many in each of two windows":       {asked: append(asked(5, audit.StatusAdmitted, at(50), time.Second), asked(5, audit.StatusAdmitted, at(60), time.Second)...)},
		"some may belong to the window before": {asked: append(asked(1, audit.StatusAdmitted, at(-1), 2*time.Second), asked(5, audit.StatusAdmitted, at(30), time.Second)...)},
		"forgotten once":                       {asked: asked(10, audit.StatusAdmitted, at(1), time.Second), forgotten: []audit.Forgotten{flush}},
		"more than forgotten once":             {asked: asked(11, audit.StatusAdmitted, at(1), time.Second), forgotten: []audit.Forgotten{flush}, want: audit.OverLimit},
		"forgotten twice":                      {asked: asked(15, audit.StatusAdmitted, at(1), time.Second), forgotten: []audit.Forgotten{flush, over}},
		"forgotten before and afterwards":      {asked: asked(6, audit.StatusAdmitted, at(1), time.Second), forgotten: []audit.Forgotten{earlier, later}, want: audit.OverLimit},
		"an error":                             {asked: asked(1, 500, at(1), time.Second), want: audit.Refused},
		"admitted and served":                  {asked: asked(1, 201, at(1), time.Second), want: audit.Refused},
	} {
		h := newSound().History
		h.Limit = audit.Limit{Max: 5, Window: time.Minute, Asked: c.asked, Forgotten: c.forgotten}
		r := audit.Check(h)
		if c.want == "" && len(r.Findings) > 0 || c.want != "" && r.Counts[c.want] != 1 {
			t.Errorf("%s: %+v, want %q", name, r.Findings, c.want)
		}
	}
}

// A limit without a denial is a finding.
func TestEmptyLimit(t *testing.T) {
	t.Parallel()
	minute := time.Date(2031, 5, 4, 12, 30, 0, 0, time.UTC)
	l := audit.Limit{Max: 5, Window: time.Minute}
	if found := l.Empty(); len(found) != 1 || found[0].Kind != audit.NeverDenied {
		t.Errorf("no requests: %+v", found)
	}
	for _, status := range []int{0, audit.StatusAdmitted, audit.StatusUndecided} {
		l.Asked = append(l.Asked, asked(3, status, minute, time.Second)...)
	}
	if found := l.Empty(); len(found) != 1 || found[0].Kind != audit.NeverDenied {
		t.Errorf("no denials: %+v", found)
	}
	l.Asked = append(l.Asked, asked(1, audit.StatusDenied, minute, time.Second)...)
	if found := l.Empty(); len(found) > 0 {
		t.Errorf("%+v", found)
	}
}
