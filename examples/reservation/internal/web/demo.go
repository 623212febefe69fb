package web

import (
	"net/http"
	"strconv"
)

// poison sends the consumer a message that cannot be processed.
func (p *Page) poison(w http.ResponseWriter, r *http.Request) {
	if err := p.cfg.Demo.Poison(r.Context()); err != nil {
		http.Error(w, "the broker takes no more of it", http.StatusServiceUnavailable)
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
	p.cfg.Demo.SlowDown(on)
	w.WriteHeader(http.StatusNoContent)
}

// outage switches a server off, or on again.
func (p *Page) outage(w http.ResponseWriter, r *http.Request) {
	on, ok := readSwitch(w, r)
	if !ok {
		return
	}
	for _, server := range p.cfg.Demo.Servers() {
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
