package operator

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

// clearScreen moves a terminal's cursor to the top and clears what is below.
const clearScreen = "\x1b[H\x1b[2J"

// status prints the state of everything on one screen.
func (o *Operator) status() *cobra.Command {
	cmd := &cobra.Command{Use: "status", Short: "Show the state of everything on one screen", Args: noArguments}
	var every seconds
	cmd.Flags().Var(&every, "watch", "show it again every so much `time`, until interrupted")
	cmd.Flags().Lookup("watch").NoOptDefVal = "2s"
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		ctx, out := cmd.Context(), cmd.OutOrStdout()
		for {
			s := o.look(ctx)
			if ctx.Err() != nil && every > 0 {
				return nil
			}
			var screen bytes.Buffer
			if every > 0 && isTerminal(out) && !wantsJSON(cmd) {
				screen.WriteString(clearScreen)
			}
			if err := o.printStatus(cmd, &screen, s); err != nil {
				return err
			}
			if _, err := out.Write(screen.Bytes()); err != nil {
				return err
			}
			if every == 0 {
				if failed := s.failed(); len(failed) > 0 {
					return errors.New(strings.Join(failed, "; "))
				}
				return nil
			}
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(time.Duration(every)):
			}
		}
	}
	return cmd
}

func (o *Operator) printStatus(cmd *cobra.Command, w io.Writer, s status) error {
	if wantsJSON(cmd) {
		return printJSONTo(w, s)
	}
	fmt.Fprintf(w, "%s  %s\n", o.cfg.Program, moment(s.At))
	outboxes := newTable(w, "\nOUTBOX", "READY", "PARKED", "DEAD", "OLDEST")
	for _, b := range s.Outboxes {
		if b.Error != "" {
			outboxes.row(b.Name, "?", "?", "?", "?")
			continue
		}
		outboxes.row(b.Name, b.Ready, b.Parked, b.Dead, age(b.OldestAge))
	}
	consumers := newTable(w, "\nCONSUMER", "WAITING", "RETRYING", "DEAD", "OF CLASS")
	for _, c := range s.Consumers {
		if c.Error != "" {
			consumers.row(c.Name, "?", "?", "?", "")
			continue
		}
		dead, classes := 0, []string(nil)
		for _, class := range slices.Sorted(maps.Keys(c.Dead)) {
			if n := c.Dead[class]; n > 0 {
				dead += n
				classes = append(classes, fmt.Sprintf("%s %d", class, n))
			}
		}
		consumers.row(c.Name, c.Waiting, c.Retrying, dead, strings.Join(classes, ", "))
	}
	err := errors.Join(outboxes.flush(), consumers.flush(), printSweeps(w, "\nSWEEP", s.Sweeps))
	if failed := s.failed(); len(failed) > 0 {
		fmt.Fprintln(w)
		for _, text := range failed {
			fmt.Fprintf(w, "! %s\n", plain(text))
		}
	}
	return err
}

func age(seconds float64) string { return span(time.Duration(seconds * float64(time.Second))) }
