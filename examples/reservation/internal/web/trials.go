package web

import (
	"context"
	"net/http"
	"strconv"
)

// Trials make trouble on purpose. They may be called from any goroutine.
type Trials interface {
	// Poison sends the consumer a message that no attempt can process. It fails where too many wait or are dead.
	Poison(ctx context.Context) error
	// SlowDown has the consumers that heed it take two seconds for a message, or no longer than they need.
	SlowDown(ctx context.Context, on bool) error
	// Slow tells whether they are told to be slow.
	Slow(ctx context.Context) (bool, error)
}

// Server can be switched off. Its methods may be called from any goroutine.
type Server interface {
	// Name is what the buttons call it: postgres, redis or rabbitmq.
	Name() string
	Off() bool
	Switch(on bool)
}

// poison sends the consumer a message that cannot be processed.
func (p *Page) poison(w http.ResponseWriter, r *http.Request) {
	if err := p.cfg.Trials.Poison(r.Context()); err != nil {
		http.Error(w, "no more of it is taken now", http.StatusServiceUnavailable)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// slow makes the consumer slow, or as fast as it is.
func (p *Page) slow(w http.ResponseWriter, r *http.Request) {
	on, ok := readSwitch(w, r)
	if !ok {
		return
	}
	if err := p.cfg.Trials.SlowDown(r.Context(), on); err != nil {
		http.Error(w, "the consumer cannot be told", http.StatusServiceUnavailable)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// outage switches a server off, or on again.
func (p *Page) outage(w http.ResponseWriter, r *http.Request) {
	on, ok := readSwitch(w, r)
	if !ok {
		return
	}
	for _, server := range p.cfg.Servers {
		if server.Name() == r.PostForm.Get("server") {
			server.Switch(!on)
			w.WriteHeader(http.StatusNoContent)
			return
		}
	}
	http.Error(w, "there is no such server", http.StatusBadRequest)
}

// readSwitch reads the field on; where it is wrong, it answers.
func readSwitch(w http.ResponseWriter, r *http.Request) (on, ok bool) {
	if err := r.ParseForm(); err != nil {
		http.Error(w, "the form cannot be read", http.StatusBadRequest)
		return false, false
	}
	on, err := strconv.ParseBool(r.PostForm.Get("on"))
	if err != nil {
		http.Error(w, "on is neither true nor false", http.StatusBadRequest)
		return false, false
	}
	return on, true
}
