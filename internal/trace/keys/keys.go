// Package keys records the runs under idempotency keys, and accepts those that keys.pml of internal/lab/models allows. One
// transaction commits for each key, and every caller gets its answer. A gate has one holder at a time and keeps nothing
// but that answer.
package keys

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/idempotency/driver"
	pgxdriver "github.com/holdfast-go/holdfast/idempotency/idempotencypgx/driver"
	"github.com/holdfast-go/holdfast/internal/trace"
	"github.com/holdfast-go/holdfast/txretry"
)

// The transitions, with their names in keys.pml.
const (
	claim   = "claim"
	replay  = "replay"
	keep    = "keep"
	release = "release"
	commit  = "commit"
	look    = "look"
	answer  = "answer"
)

// Transitions are the names of the transitions. The end of a lease is no call: key.over has it. A renewal is a claim of the
// same run. A record is known by its answer, which differs from run to run.
var Transitions = []string{claim, replay, keep, release, commit, look, answer}

// key is the state of an idempotency key. Steps copy it.
type key struct {
	holder string        // the token of the claim at the gate; "": none
	lease  time.Duration // its length; 0: unknown
	until  time.Time     // it does not end before
	kept   string        // the answer that the gate keeps; "": none
	saver  string        // the token of the run that stored it there
	record string        // the answer that has committed; "": none
}

// slop is the time by which a server rounds a lease.
const slop = 2 * time.Millisecond

// over reports whether the lease may have ended.
func (k key) over(at time.Time) bool { return !at.Before(k.until.Add(-slop)) }

// claimed makes a run the holder, from start to at: nobody holds the key, or a lease has ended, or it holds the key
// already.
func (k key) claimed(token string, lease time.Duration, start, at time.Time) []key {
	if k.kept != "" || k.holder != "" && k.holder != token && !k.over(at) {
		return nil
	}
	k.holder, k.lease, k.until = token, lease, start.Add(lease)
	return []key{k}
}

// extended starts the lease of the holder again.
func (k key) extended(token string, start time.Time) []key {
	if k.holder != token {
		return nil
	}
	return k.claimed(token, k.lease, start, start)
}

// busy is a claim that another run prevents.
func (k key) busy(token string) []key {
	if k.kept != "" || k.holder == "" || k.holder == token {
		return nil
	}
	return []key{k}
}

// lost is a call of a run that does not hold the key any more.
func (k key) lost(token string, at time.Time) []key {
	if k.kept == "" && k.holder == token && !k.over(at) {
		return nil
	}
	return []key{k}
}

// replayed is the answer of the gate.
func (k key) replayed(a string) []key {
	if k.kept != a || a == "" {
		return nil
	}
	return []key{k}
}

// keeps is the end of a run whose answer the gate keeps. It is the answer that has committed.
func (k key) keeps(token, a string) []key {
	if k.kept != "" && k.saver == token {
		return []key{k} // a repetition
	}
	if k.holder != token || k.kept != "" || a == "" || a != k.record {
		return nil
	}
	k.holder, k.kept, k.saver = "", a, token
	return []key{k}
}

// released is the end of a run without an answer.
func (k key) released(token string) []key {
	if k.holder != token || k.kept != "" {
		return nil
	}
	k.holder = ""
	return []key{k}
}

// commits is the commit of a run's effect with its record, the only one of the key.
func (k key) commits(a string) []key {
	if k.record != "" || a == "" {
		return nil
	}
	k.record = a
	return []key{k}
}

// looks reads the record. a is "" if there is none.
func (k key) looks(a string) []key {
	if k.record != a {
		return nil
	}
	return []key{k}
}

// answers is the answer that a caller gets.
func (k key) answers(a string) []key {
	if a == "" {
		return nil
	}
	return k.looks(a)
}

// Log is the run of all callers.
type Log struct{ trace *trace.Log[key] }

// New returns an empty Log.
func New() *Log { return &Log{trace.New[key](Transitions...)} }

// Counts returns how many calls of each transition were recorded.
func (l *Log) Counts() map[string]int { return l.trace.Counts() }

// Check returns an error if keys.pml does not allow the run, or if a key has no record.
func (l *Log) Check() error {
	return l.trace.Check(key{}, func(k key) bool { return k.record != "" })
}

// Call records a call of one caller. Run returns the answer.
func (l *Log) Call(name driver.Key, run func() (string, error)) error {
	from := l.trace.Now()
	a, err := run()
	if err == nil {
		l.trace.Add(string(name), answer, a, from, func(k key) []key { return k.answers(a) })
	}
	return err
}

// Gate returns a gate with a record of its calls.
func (l *Log) Gate(inner driver.Store) driver.Store { return &gate{inner, l.trace} }

type gate struct {
	inner driver.Store
	log   *trace.Log[key]
}

func (g *gate) Begin(ctx context.Context, c driver.Claim) (driver.BeginResult, error) {
	from, start := g.log.Now(), time.Now()
	out, err := g.inner.Begin(ctx, c)
	at := time.Now()
	switch {
	case err != nil: // its lease is unknown
		g.log.AddOpen(string(c.Key), claim, c.Token+" without an answer", from, func(k key) []key { return k.claimed(c.Token, 0, start, at) })
	case out.State == driver.Acquired:
		g.log.Add(string(c.Key), claim, c.Token, from, func(k key) []key { return k.claimed(c.Token, out.Lease, start, at) })
	case out.State == driver.InProgress:
		g.log.Add(string(c.Key), claim, c.Token+" of another run", from, func(k key) []key { return k.busy(c.Token) })
	default:
		a := string(out.Response.Body)
		g.log.Add(string(c.Key), replay, a, from, func(k key) []key { return k.replayed(a) })
	}
	return out, err
}

func (g *gate) Extend(ctx context.Context, c driver.Claim) error {
	from, start := g.log.Now(), time.Now()
	err := g.inner.Extend(ctx, c)
	g.end(c, claim, " again", from, err, func(k key) []key { return k.extended(c.Token, start) })
	return err
}

func (g *gate) Complete(ctx context.Context, c driver.Claim, resp driver.Response) error {
	from := g.log.Now()
	err := g.inner.Complete(ctx, c, resp)
	g.end(c, keep, " "+string(resp.Body), from, err, func(k key) []key { return k.keeps(c.Token, string(resp.Body)) })
	return err
}

func (g *gate) Release(ctx context.Context, c driver.Claim) error {
	from := g.log.Now()
	err := g.inner.Release(ctx, c)
	g.end(c, release, "", from, err, func(k key) []key { return k.released(c.Token) })
	return err
}

// end records a call of the holder.
func (g *gate) end(c driver.Claim, name, text string, from int, err error, step func(key) []key) {
	at := time.Now()
	switch {
	case err == nil:
		g.log.Add(string(c.Key), name, c.Token+text, from, step)
	case errors.Is(err, driver.ErrLeaseLost):
		g.log.Add(string(c.Key), name, c.Token+text+", lost", from, func(k key) []key { return k.lost(c.Token, at) })
	default:
		g.log.AddOpen(string(c.Key), name, c.Token+text+" without an answer", from, step)
	}
}

// Transactor returns a transactor with a record of the commits of Records.
func (l *Log) Transactor(inner txretry.Transactor) txretry.Transactor {
	return &transactor{inner, l.trace}
}

type transactor struct {
	txretry.Transactor
	log *trace.Log[key]
}

// attempt has the record that a transaction has inserted.
type attempt struct{ rec *pgxdriver.Record }

type attemptKey struct{}

func (t *transactor) DoWith(ctx context.Context, o txretry.Options, fn func(context.Context, pgx.Tx) error) error {
	var a attempt
	from := t.log.Now()
	err := t.Transactor.DoWith(ctx, o, func(ctx context.Context, tx pgx.Tx) error {
		a.rec = nil
		return fn(context.WithValue(ctx, attemptKey{}, &a), tx)
	})
	if a.rec == nil {
		return err
	}
	name, body := string(a.rec.Key), string(a.rec.Response.Body)
	step := func(k key) []key { return k.commits(body) }
	if err == nil {
		t.log.Add(name, commit, body, from, step)
	} else if _, unknown := errors.AsType[*txretry.CommitUnknownError](err); unknown {
		t.log.AddOpen(name, commit, body+" without an answer", from, step)
	}
	return err
}

// Records returns records with a record of their reads.
func (l *Log) Records(inner pgxdriver.Records) pgxdriver.Records { return &records{inner, l.trace} }

type records struct {
	pgxdriver.Records
	log *trace.Log[key]
}

func (r *records) Insert(ctx context.Context, tx pgx.Tx, rec pgxdriver.Record) error {
	if a, ok := ctx.Value(attemptKey{}).(*attempt); ok {
		a.rec = &rec
	}
	return r.Records.Insert(ctx, tx, rec)
}

func (r *records) Lookup(ctx context.Context, k driver.Key) (pgxdriver.Record, bool, error) {
	from := r.log.Now()
	rec, found, err := r.Records.Lookup(ctx, k)
	r.looked(k, from, rec, err)
	return rec, found, err
}

func (r *records) Resolve(ctx context.Context, k driver.Key) (pgxdriver.Record, bool, error) {
	from := r.log.Now()
	rec, found, err := r.Records.Resolve(ctx, k)
	r.looked(k, from, rec, err)
	return rec, found, err
}

func (r *records) looked(name driver.Key, from int, rec pgxdriver.Record, err error) {
	if err == nil {
		a := string(rec.Response.Body)
		r.log.Add(string(name), look, fmt.Sprintf("%q", a), from, func(k key) []key { return k.looks(a) })
	}
}
