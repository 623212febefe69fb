package operator

import (
	"maps"
	"slices"
	"sync"
)

// maxKnown bounds the values of a field that are remembered.
const maxKnown = 500

// known are the names and classes that the views have shown since the process began, with which filters complete what is
// typed. To ask for all would read every letter of a queue.
type known struct {
	mu             sync.Mutex
	names, classes map[string]bool
}

// learn adds what a view is about to show.
func (k *known) learn(found any) {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch found := found.(type) {
	case []group:
		for _, g := range found {
			k.add(g.Sample)
		}
	case []letter:
		for _, l := range found {
			k.add(l)
		}
	case waitingView:
		for _, l := range found.Letters {
			k.add(l)
		}
	}
}

func (k *known) add(l letter) {
	if k.names == nil {
		k.names, k.classes = map[string]bool{}, map[string]bool{}
	}
	remember(k.names, l.Name)
	remember(k.classes, l.Class)
}

func remember(values map[string]bool, value string) {
	if value != "" && len(values) < maxKnown {
		values[value] = true
	}
}

// lists are the names and the classes in their order.
func (k *known) lists() (names, classes []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Sorted(maps.Keys(k.names)), slices.Sorted(maps.Keys(k.classes))
}
