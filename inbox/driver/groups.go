package driver

import (
	"cmp"
	"slices"

	"github.com/holdfast-go/holdfast/inbox"
)

// maxGroups bounds the memory of a grouping: fingerprints come from outside.
const maxGroups = 1000

// groups counts dead letters by their fingerprints. The zero value is ready.
type groups struct {
	of   map[string]*inbox.Group
	rest inbox.Group // what comes when there are too many
}

func (g *groups) add(dead inbox.DeadLetter) {
	if g.of == nil {
		g.of = map[string]*inbox.Group{}
	}
	group := g.of[dead.Fingerprint]
	switch {
	case group != nil:
	case len(g.of) < maxGroups:
		group = &inbox.Group{Fingerprint: dead.Fingerprint}
		g.of[dead.Fingerprint] = group
	default:
		group = &g.rest
	}
	group.Count++
	if group.First.IsZero() || dead.FailedAt.Before(group.First) {
		group.First = dead.FailedAt
	}
	if group.Count == 1 || !dead.FailedAt.Before(group.Last) {
		group.Last, group.Sample = dead.FailedAt, withoutContent(dead)
	}
}

// largest returns the groups, the one with the most letters first; 0 means all.
func (g *groups) largest(most int) []inbox.Group {
	var all []inbox.Group
	for _, group := range g.of {
		all = append(all, *group)
	}
	if g.rest.Count > 0 {
		all = append(all, g.rest)
	}
	slices.SortFunc(all, func(a, b inbox.Group) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(a.Fingerprint, b.Fingerprint))
	})
	if most > 0 {
		all = all[:min(len(all), most)]
	}
	return all
}
