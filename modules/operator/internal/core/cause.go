package core

import (
	"cmp"
	"context"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/modules/operator"
)

// reached is the part of a network error that names the server's address.
var reached = regexp.MustCompile(`\b(?:dial|read|write) (?:tcp|unix)[46]?:? (?:\S+->)?(?:lookup )?(\S+?):? `)

// owner is the name of a package before an error.
var owner = regexp.MustCompile(`^([a-z]+: )+`)

// cause returns a key that the errors of one cause share, and the error without the words of the part that returned it. An error
// that names an address is about the server there. The other errors share a cause if both are about a connection, and their texts
// are equal. An empty key means that the cause is unknown.
func cause(reason string) (key, text string) {
	if at := reached.FindStringSubmatchIndex(reason + " "); at != nil {
		return reason[at[2]:min(at[3], len(reason))], reason[at[0]:]
	}
	for _, before := range []string{"no session with the broker: ", "unavailable: "} {
		if _, after, ok := strings.Cut(reason, before); ok {
			text = owner.ReplaceAllString(after, "")
			return "text " + text, text
		}
	}
	return "", reason
}

// grouped merges problems with the same cause into one. Each stands where its first problem stood.
func grouped(all []Problem) []Problem {
	members, keys := map[string][]Problem{}, make([]string, len(all))
	parts := map[string]string{} // the cause of each part
	for i, p := range all {
		if keys[i], _ = cause(p.Reason); keys[i] != "" && parts[p.Part] == "" {
			parts[p.Part] = keys[i]
		}
	}
	for i, p := range all {
		if p.Reason == "" && !p.dead { // such as the lag behind a transport that waits
			keys[i] = parts[p.Part]
		}
		members[keys[i]] = append(members[keys[i]], p)
	}
	left := []Problem{} // not null in JSON
	for i, p := range all {
		switch group := members[keys[i]]; {
		case keys[i] == "" || len(group) == 1:
			left = append(left, p)
		case len(group) > 0:
			left = append(left, together(group))
			members[keys[i]] = nil
		}
	}
	return left
}

// together returns the problem of several that share a cause.
func together(group []Problem) Problem {
	var one Problem
	var waiting []string
	for _, p := range group {
		key, text := cause(p.Reason)
		one.Reason = cmp.Or(one.Reason, text)
		if !strings.HasPrefix(key, "text ") {
			one.Part = cmp.Or(one.Part, key)
		}
		if !p.Since.IsZero() && (one.Since.IsZero() || p.Since.Before(one.Since)) {
			one.Since = p.Since
		}
		if one.Alert == "" {
			one.Alert, one.Runbook = p.Alert, p.Runbook
		}
		if !p.server && !slices.Contains(waiting, p.Part) {
			waiting = append(waiting, p.Part)
		}
		p.Reason = ""
		one.Affected = append(one.Affected, p)
	}
	for _, p := range group {
		if p.server {
			one.Part = p.Part
		}
	}
	wait := " wait"
	if len(waiting) == 1 {
		wait = " waits"
	}
	one.Text, one.Place = "does not answer", group[0].Place
	if len(waiting) > 0 {
		one.Text += ": " + enumerated(waiting) + wait
	}
	if one.Part == "" {
		one.Part, one.Text = enumerated(waiting), wait[1:]+" for the same reason"
	}
	return one
}

// enumerated joins names for a sentence.
func enumerated(names []string) string {
	if len(names) < 2 {
		return strings.Join(names, "")
	}
	last := len(names) - 1
	return strings.Join(names[:last], ", ") + " and " + names[last]
}

// Links are the problems of different parts behind this one, for links to their places.
func (p Problem) Links() []Problem {
	var all []Problem
	for _, a := range p.Affected {
		if !a.server && !slices.ContainsFunc(all, func(b Problem) bool { return b.Part == a.Part }) {
			all = append(all, a)
		}
	}
	return all
}

// each returns the problems behind this one, or itself.
func (p Problem) each() []Problem {
	if len(p.Affected) > 0 {
		return p.Affected
	}
	return []Problem{p}
}

// Alerts are the problems with the different alerts that this one raises, the most urgent first.
func (p Problem) Alerts() []Problem {
	var all []Problem
	for _, a := range p.each() {
		if a.Alert != "" && !slices.ContainsFunc(all, func(b Problem) bool { return b.Alert == a.Alert }) {
			all = append(all, a)
		}
	}
	return all
}

const (
	// pingEvery is the time between pings of servers while something does not answer.
	pingEvery = 5 * time.Second
	// pingTimeout bounds them.
	pingTimeout = 2 * time.Second
)

// unanswered is a server that does not answer a ping.
type unanswered struct{ server, reason string }

// ping returns the servers that do not answer. It pings only servers whose connections are unknown, and only while something else
// has failed at an address that no server has named: a ping costs RabbitMQ a connection.
func (o *Operator) ping(ctx context.Context, found []Problem) []unanswered {
	unnamed := func(p Problem) bool {
		key, _ := cause(p.Reason)
		named := slices.ContainsFunc(p.Affected, func(a Problem) bool { return a.server })
		return key != "" && !named
	}
	if !slices.ContainsFunc(found, unnamed) {
		return nil
	}
	return o.pinged.within(pingEvery, func() []unanswered {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), pingTimeout) // others wait for it, too
		defer cancel()
		silent := slices.DeleteFunc(slices.Clone(o.Config.Servers), func(s operator.Server) bool { return s.Connections != nil })
		reasons := make([]string, len(silent))
		var asking sync.WaitGroup
		for i, s := range silent {
			asking.Go(func() { reasons[i] = TextOf(s.Ping(ctx)) })
		}
		asking.Wait()
		var all []unanswered
		for i, s := range silent {
			if reasons[i] != "" {
				all = append(all, unanswered{s.Name, reasons[i]})
			}
		}
		return all
	})
}
