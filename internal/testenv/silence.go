package testenv

import "bytes"

// Silence says which connections of a Proxy fall silent. A silent connection stays open on both
// sides and carries nothing any more, as behind a router that has forgotten it. The server is not
// told when its client closes: a transaction stays open there until Heal or Cut.
type Silence struct {
	// On is what sets it off: a text in what a client sends at once, such as "commit". ""
	// means whatever passes next.
	On string

	// Answer looks for On in what the server sends instead.
	Answer bool

	// Deliver lets what contains On arrive, and nothing after it: the request takes effect and its
	// answer is lost.
	Deliver bool

	// OneWay loses only what the server sends; the client's requests still arrive.
	OneWay bool

	// Connections is how many fall silent, each when it sends On; 0 means one.
	Connections int
}

// SilenceOn makes the next connections that s describes fall silent. It replaces what an earlier
// SilenceOn still waits for; Heal and Cut end it.
func (p *Proxy) SilenceOn(s Silence) {
	s.Connections = max(s.Connections, 1)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.silence = s
}

// SilenceConnections makes every connection of now half-open: both sides see it open, and nothing
// that either sends arrives, not even that it has closed. New connections are served. Heal, Cut
// and CutConnections reset the silent ones.
func (p *Proxy) SilenceConnections() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		p.mute(l, false)
	}
	p.changed.Broadcast()
}

// Silenced returns how many connections have fallen silent since the proxy began.
func (p *Proxy) Silenced() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.silenced
}

// mute makes one connection silent, or its server's half; p.mu is held.
func (p *Proxy) mute(l *link, oneWay bool) {
	if !l.lossy {
		p.silenced++
	}
	l.lossy, l.silent = true, l.silent || !oneWay
}

// silences reports whether data sets off the silence of its connection; p.mu is held.
func (p *Proxy) silences(l *link, data []byte, replies bool) bool {
	s := &p.silence
	if s.Connections == 0 || l.lossy || s.Answer != replies || !bytes.Contains(data, []byte(s.On)) {
		return false
	}
	s.Connections--
	p.mute(l, s.OneWay)
	return true
}
