package inboxredis

import "sync"

// pageGrowth is by how much pages grow again with each that comes in time.
const pageGrowth = pageBytes / 256

// pages bound what one read asks for. Redis counts entries, not bytes: a window of large ones would
// not come within the timeout, and be asked for again and again.
type pages struct {
	mu    sync.Mutex
	bytes int // of a page
	entry int // how large an entry is, as far as the last page tells; 0: not known
}

func newPages() *pages { return &pages{bytes: pageBytes} }

// next is how many entries to ask for, at most so many.
func (p *pages) next(most int) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.entry == 0 {
		return min(most, firstPage)
	}
	return min(most, max(p.bytes/p.entry, 1))
}

// came learns from entries that were read.
func (p *pages) came(entries []entry) {
	if len(entries) == 0 {
		return
	}
	size := 0
	for _, e := range entries {
		for name, value := range e.fields {
			size += len(name) + len(text(value))
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.entry = max(size/len(entries), 1)
	p.bytes = min(p.bytes+pageGrowth, pageBytes)
}

// late learns that so many did not come in time: the next page is half of that.
func (p *pages) late(asked int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.bytes = max(p.bytes/2, 1)
	p.entry = max(p.entry, p.bytes/max(asked/2, 1), 1)
}
