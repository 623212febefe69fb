package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
)

// groups prints one line per kind of failure in the inbox, the most frequent first.
func (s deadStores) groups(ctx context.Context, w io.Writer, f deadFilter) error {
	all, err := s.inbox.Groups(ctx, f.inbox())
	if err != nil {
		return err
	}
	for _, g := range all {
		fmt.Fprintf(w, "%s\t%s\t%s\t%d\tfrom %s\tto %s\t%s\t%#q\n", g.Fingerprint, g.Sample.Class, g.Sample.Message.Name, g.Count,
			g.First.UTC().Format(time.RFC3339), g.Last.UTC().Format(time.RFC3339), g.Sample.Message.ID, g.Sample.Error)
	}
	return nil
}

// printOrigin tells what a failure was, and those before.
func printOrigin(w io.Writer, d inbox.DeadLetter) {
	fmt.Fprintf(w, "\tkind: %s\ttype: %s\tsqlstate: %s\tconsumer: %s\n", d.Fingerprint, d.ErrorType, d.SQLState, d.Consumer)
	for _, a := range d.Message.History {
		fmt.Fprintf(w, "\tbefore: %s\t%s\t%#q\n", a.At.UTC().Format(time.RFC3339), a.Consumer, a.Error)
	}
}
