package idempotency

import (
	"errors"
	"maps"
	"net/http"
	"time"

	"github.com/holdfast-go/holdfast/idempotency/driver"
)

// exchange is one request on its way through the middleware. All that it needs
// is in here, so that it is one allocation.
type exchange struct {
	run
	m        *middleware
	w        http.ResponseWriter
	r        *http.Request
	came     time.Time
	rec      recorder
	body     body
	bypassed bool
	result   result // how the request ends
	err      error  // why it was refused, or its result not stored
}

// serve runs the handler under the claim and closes the claim before the
// client sees a byte.
func (x *exchange) serve() {
	ctx := x.start(x.r.Context(), true)
	defer x.end()
	x.rec.reset(x.w, x.maxBytes, x)
	x.m.meter.active.Add(ctx, 1)
	defer x.m.meter.active.Add(x.r.Context(), -1)

	returned := false
	defer func() {
		if !returned { // the panic goes on to whoever recovers it
			x.finish(x.unkept())
		}
	}()
	x.m.next.ServeHTTP(&x.rec, x.r.WithContext(ctx))
	returned = true

	if x.rec.spilled {
		x.finish(x.unkept())
		return
	}
	if s := x.settled.Load(); s != nil {
		x.finish(nil)
		x.sendSettled(s)
		return
	}
	if x.rec.status == 0 && !x.effect.Load() && ctx.Err() != nil { // it was cut short: this is no implicit 200
		x.finish(nil)
		x.rec.rewind()
		x.m.cfg.refuse(x.w, ErrLeaseLost) // what it says holds for a deadline, too
		return
	}
	resp := x.rec.response(x.m.cfg.KeepHeaders)
	if x.effect.Load() || x.keep(x.rec.status) {
		x.finish(&resp)
	} else {
		x.finish(nil)
	}
	if x.replays() { // another run has completed the key meanwhile
		x.sendSettled(x.settled.Load())
		return
	}
	x.rec.send()
}

// spills records, before the first byte leaves, that the work was done and
// that its response cannot be kept.
func (x *exchange) spills(status int) {
	hijacked := status == 0
	if hijacked || x.effect.Load() || x.keep(status) {
		x.finish(&driver.Response{})
	}
}

func (x *exchange) replays() bool {
	s := x.settled.Load()
	return s != nil && s.replayed
}

// finish tells the store how the run ended. A failure leaves the key taken until
// its lease runs out; the client gets its answer all the same.
func (x *exchange) finish(resp *driver.Response) {
	if x.closed {
		return
	}
	if x.bypassed {
		x.closed = true // nobody holds it
		if x.result = resultOfRun(x.settled.Load(), resp, x.refused.Load(), nil); x.result != resultStoreDown {
			x.result = resultBypassed
		}
		return
	}
	x.err = x.close(resp)
	x.result = resultOfRun(x.settled.Load(), resp, x.refused.Load(), x.err)
	if x.err != nil && !x.replays() {
		x.log("idempotency: result could not be stored", x.err)
	}
}

// sendSettled answers from the record that the handler settled. A tombstone of
// this very run is for later requests; this one gets what the handler wrote.
func (x *exchange) sendSettled(s *settlement) {
	switch {
	case s.replayed:
		x.rec.rewind()
		x.answer(s.record)
	case s.record.Response.Unavailable() && x.rec.status == 0: // it was left to the middleware, which does not have it
		x.m.cfg.refuse(x.w, ErrResultUnavailable)
	case s.record.Response.Unavailable():
		x.rec.send()
	default:
		x.rec.WriteHeader(http.StatusOK) // for a handler that wrote nothing
		header := x.w.Header()
		clear(header)
		maps.Copy(header, x.rec.sent)
		header.Del("Content-Length")
		Response(s.record.Response).Send(x.w)
	}
}

// answer serves a request whose work is done, or being done, by another run.
func (x *exchange) answer(out driver.BeginResult) {
	if err := refusal(out, x.claim.Fingerprint); err != nil {
		x.refuse(err)
		return
	}
	x.result, x.err = resultReplayed, nil
	x.m.cfg.OnReplay(x.r)
	x.w.Header().Set(ReplayedHeader, "true")
	Response(out.Response).Send(x.w)
}

// refuse answers with the problem that stands for err.
func (x *exchange) refuse(err error) {
	if errors.Is(err, errScope) {
		x.log("idempotency: scope failed", err)
	}
	x.result, x.err = resultOf(err), err
	x.m.cfg.refuse(x.w, err)
}
