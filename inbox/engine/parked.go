package engine

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/internal/base"
)

// The targets of a message whose key is parked, besides those of the source.
const (
	toPark driver.Target = -1 - iota // behind its key's others
	toStop                           // as the dead letter that stops its key
)

const (
	// maxParked bounds how many keys are parked: each is known to the loop. The next one waits in hand.
	maxParked = 100_000

	// maxParkedKey bounds the length of a key that is stored as it is, for an index.
	maxParkedKey = 255

	// parkedPatience is how long the first message of a key is left to others by a process that has
	// received nothing yet: the source may serve another one, which processes it.
	parkedPatience = 10 * time.Second
)

var (
	errTooManyParked = errors.New("too many ordering keys are parked")
	errParkedFull    = errors.New("MaxParked messages wait with their keys: replay or remove dead letters")
)

// parkedName is the name of an ordering key in a driver.Parking.
func parkedName(key string) string {
	if len(key) <= maxParkedKey && base.IsText(key) {
		return key
	}
	sum := sha256.Sum256([]byte(key))
	return "sha256:" + hex.EncodeToString(sum[:])
}

// parked are the ordering keys that wait for an operator, or have messages left from then: whatever
// arrives for such a key is stored behind them. The loop alone uses it.
type parked struct {
	hand     *hand
	keeper   *keeper
	claims   *claims
	session  *session // nil: none
	most     int      // stored messages in hand, and asked for
	keys     map[string]*parkedKey
	inHand   int
	asking   int         // questions of the keeper
	wanted   []string    // keys to be asked about when there is room
	arrivals []*item     // to be stored
	left     []uuid.UUID // claimed for the session that has ended last, and not processed
	served   bool        // the source serves this process
	now      time.Time   // of the last look
}

// parkedKey is one key.
type parkedKey struct {
	stopped bool      // its first message is a dead letter, as far as is known
	busy    bool      // its first message is in hand
	asked   bool      // its first message is asked for, or will be
	stored  int       // grows with each message that is stored
	since   time.Time // when it was seen that its first message may be processed, or that another process does
}

// takes reports whether an item that has arrived must be stored, and takes it.
func (p *parked) takes(it *item) bool {
	if p == nil || it.key == "" || p.keys[it.key] == nil || it.m.Validate() != nil {
		return false
	}
	it.state, it.order = moving, order{target: toPark, outcome: stored}
	p.arrivals = append(p.arrivals, it)
	return true
}

// deadTarget is where a message really goes that is to go to the dead letters.
func deadTarget(p *parked, it *item) driver.Target {
	if p == nil || it.key == "" && it.parkedAs == "" || it.m.Validate() != nil {
		return driver.ToDead
	}
	return toStop
}

// moved notes that a message is stored.
func (p *parked) moved(it *item) {
	switch {
	case p == nil:
	case it.parkedAs != "" && it.session != p.session: // the key may be in hand for this one
	case it.order.target == toStop && it.parkedAs != "":
		p.release(it.parkedAs).stopped = true
	case it.order.target == toStop:
		p.key(it.key).stopped = true
	case it.order.target == toPark:
		p.key(it.key).stored++
		p.ask(it.key)
	}
}

func (p *parked) key(name string) *parkedKey {
	k := p.keys[name]
	if k == nil {
		k = &parkedKey{}
		p.keys[name] = k
	}
	return k
}

// release notes that a key's first message is in hand no longer.
func (p *parked) release(name string) *parkedKey {
	k := p.key(name)
	if k.busy {
		k.busy = false
		p.inHand--
		p.fill()
	}
	return k
}

// forsake notes that a stored message leaves the hand as it is. It may be asked for again.
func (p *parked) forsake(it *item) {
	if !it.claim.taken {
		p.left = append(p.left, it.m.ID)
	}
	if it.session == p.session {
		p.release(it.parkedAs)
	}
}

// settled goes on with the keys whose first messages are done.
func (p *parked) settled(done []driver.Delivery) {
	if p == nil {
		return
	}
	for _, d := range done {
		if stored, ok := d.(*storedDelivery); ok && stored.session == p.session && p.keys[stored.key] != nil {
			p.release(stored.key)
			p.ask(stored.key)
		}
	}
}

// ask has the first message of a key read, if that may be processed now or may be the last.
func (p *parked) ask(name string) {
	k := p.keys[name]
	switch {
	case p.session == nil: // the next one looks at all keys
		return
	case k == nil || k.stopped || k.busy || k.asked || p.hand.keys.direct(name):
		return
	case !p.served && (k.since.IsZero() || p.now.Sub(k.since) < parkedPatience):
		return
	}
	k.asked = true
	p.wanted = append(p.wanted, name)
	p.fill()
}

// fill has first messages read as long as there is room for them. Each may be large.
func (p *parked) fill() {
	for len(p.wanted) > 0 && p.inHand+p.asking < p.most {
		name := p.wanted[0]
		p.wanted = p.wanted[1:]
		p.asking++
		p.keeper.ask(question{name, p.keys[name].stored})
	}
}

// look takes what a look at all keys has shown: what others have done, operators above all.
func (p *parked) look(ev event, now time.Time) {
	if ev.session != p.session {
		return
	}
	p.now, p.served = now, p.served || ev.served
	left := make(map[string]bool, len(ev.heads))
	for _, head := range ev.heads {
		left[head.Key] = true
		k := p.key(head.Key)
		if k.since.IsZero() || head.Stopped {
			k.since = now
		}
		k.stopped = head.Stopped
		p.ask(head.Key)
	}
	for name, k := range p.keys {
		if !left[name] {
			k.stopped = false
			p.ask(name) // it is free if that is still so
		}
	}
}

// first takes the answer to a question: the message to be processed next, or that there is none.
func (p *parked) first(ev event, now time.Time) {
	a := ev.answer
	k := p.keys[a.name]
	if ev.session != p.session && a.message != nil {
		p.left = append(p.left, a.message.ID)
	}
	if k == nil || ev.session != p.session {
		return
	}
	k.asked = false
	p.asking--
	defer p.fill()
	switch {
	case a.err != nil: // the next look asks again
	case a.message != nil:
		k.busy = true
		p.inHand++
		p.claims.add(now)
		p.hand.add(&item{
			d: &storedDelivery{a.name, a.message, ev.session}, m: a.message, session: ev.session,
			parkedAs: a.name, claim: &claim{until: a.until}, single: true,
		}, now)
	case a.there: // another process has it, or it is a dead letter: the next look tells
		k.stopped, k.since = true, now
	case k.stored != a.stored: // one was stored meanwhile
		p.ask(a.name)
	default: // one that is being stored brings the key back
		delete(p.keys, a.name)
	}
}

// serve begins with a session, of which nothing is known yet.
func (p *parked) serve(s *session) {
	if p == nil {
		return
	}
	p.session = s
	p.keeper.serve(s)
	if s != nil {
		p.left = nil
	}
}

// reset forgets all keys: the session has ended, and the queue may be somebody else's.
func (p *parked) reset() {
	if p == nil {
		return
	}
	for _, it := range p.arrivals {
		it.state = held // so that the hand drops it, too
	}
	p.keys, p.inHand, p.asking, p.wanted, p.arrivals, p.served = map[string]*parkedKey{}, 0, 0, nil, nil, false
	p.serve(nil)
}

// parkedHeads reads all keys.
func parkedHeads(ctx context.Context, p driver.Parking) (all []driver.Head, err error) {
	const page = 1000
	for after := ""; ; after = all[len(all)-1].Key {
		heads, err := p.Heads(ctx, after, page)
		if err != nil {
			return nil, err
		}
		if all = append(all, heads...); len(heads) < page {
			return all, nil
		}
		if len(all) > 2*maxParked { // some more than that may have come in while others were counted
			return nil, errTooManyParked
		}
	}
}
