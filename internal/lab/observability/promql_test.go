package observability

import (
	"regexp"
	"slices"
	"strings"
)

// use is a metric that an expression selects, with the labels it asks for and their values.
type use struct {
	metric string // a name, or a pattern of names
	labels map[string][]string
}

var (
	selector  = regexp.MustCompile(`([a-z_][a-z0-9_]*)?\{([^}]*)\}|\b(?:holdfast|process|go)_[a-z0-9_]+`)
	matcher   = regexp.MustCompile(`(\w+)(=~|!~|!=|=)"([^"]*)"`)
	grouping  = regexp.MustCompile(`\b(?:by|on) \(([^)]*)\)`)
	plainText = regexp.MustCompile(`^[\w. ]+(\|[\w. ]+)*$`)
)

// usesOf reads the expressions of this package, which are simple: no string holds a brace.
func usesOf(expr string) []use {
	var uses []use
	for _, found := range selector.FindAllStringSubmatch(grouping.ReplaceAllString(expr, ""), -1) {
		u := use{metric: found[1], labels: map[string][]string{}}
		if found[2] == "" {
			u.metric = strings.TrimSuffix(found[0], "{}")
		}
		for _, m := range matcher.FindAllStringSubmatch(found[2], -1) {
			if m[1] == "__name__" {
				u.metric = m[3]
				continue
			}
			var values []string
			if m[2] == "=" || m[2] == "=~" && plainText.MatchString(m[3]) {
				values = strings.Split(m[3], "|")
			}
			u.labels[m[1]] = values
		}
		uses = append(uses, u)
	}
	return uses
}

// groupsOf are the labels that an expression groups by.
func groupsOf(expr string) []string {
	var all []string
	for _, found := range grouping.FindAllStringSubmatch(expr, -1) {
		for name := range strings.SplitSeq(found[1], ",") {
			all = append(all, strings.TrimSpace(name))
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}
