package engine

// keys are the ordering keys in hand. Of each key the first item is under way, and the others wait
// for it in their order.
type keys map[string]*lane

// lane is what is in hand of one key.
type lane struct {
	first  *item
	behind fifo
}

// enter puts an item at the end of its key's lane, and reports whether it is the first.
func (k keys) enter(it *item) bool {
	l := k[it.key]
	if l == nil {
		k[it.key] = &lane{first: it}
		return true
	}
	l.behind.push(it)
	return false
}

// leave takes the first item out of its key's lane and returns the next.
func (k keys) leave(it *item) (next *item) {
	l := k[it.key]
	if l == nil || l.first != it {
		return nil
	}
	if l.first = l.behind.pop(); l.first == nil {
		delete(k, it.key)
	}
	return l.first
}

// clear drops what waits, and the lanes whose first item is not kept.
func (k keys) clear(kept func(*item) bool) {
	for key, l := range k {
		l.behind = fifo{}
		if !kept(l.first) {
			delete(k, key)
		}
	}
}
