package operator_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/command"
)

// manyConsumer has enough dead letters for a progress bar. It counts the counts before a change, which only the bar needs.
type manyConsumer struct{ counts *int }

const manyDead = 200

func (c manyConsumer) DeadLetters() inbox.DeadLetters { return manyDeadLetters{counts: c.counts} }

type manyDeadLetters struct {
	inbox.DeadLetters
	counts *int
}

func (l manyDeadLetters) Count(context.Context, inbox.Filter) (int, error) {
	*l.counts++
	return manyDead, nil
}

func (l manyDeadLetters) Remove(_ context.Context, _ inbox.Filter, how inbox.Removal) (int, error) {
	for n := range manyDead {
		if how.Progress != nil {
			how.Progress(n + 1)
		}
	}
	return manyDead, nil
}

// A terminal gets a progress bar. Another device, as in 2>/dev/null, gets none, and nothing is counted for one.
func TestBarIsForTerminals(t *testing.T) {
	t.Parallel()
	null := must(os.OpenFile(os.DevNull, os.O_WRONLY, 0))(t)
	defer func() { _ = null.Close() }()
	if counts := dropMany(t, null); counts != 0 {
		t.Errorf("for a bar on %s dead letters were counted %d times", os.DevNull, counts)
	}
	screen, shown := terminal(t)
	if counts := dropMany(t, screen); counts != 1 {
		t.Errorf("for a bar on a terminal dead letters were counted %d times", counts)
	}
	check(t, screen.Close())
	if drawn := shown(); !bytes.Contains(drawn, fmt.Appendf(nil, "/%d", manyDead)) {
		t.Errorf("the terminal shows %q", drawn)
	}
}

// dropMany drops all dead letters with errs as its error output. It returns how often they were counted before.
func dropMany(t *testing.T, errs *os.File) (counts int) {
	t.Helper()
	service := operator.Config{Consumers: []operator.Consumer{{Name: "many", Consumer: manyConsumer{&counts}}}}
	var out bytes.Buffer
	if code := command.Run(t.Context(), service, []string{"drop", "--all", "--by=ada"}, &out, errs); code != 0 {
		t.Errorf("it exits with %d: %s", code, &out)
	}
	return counts
}

// terminal returns a new terminal. shown returns the text that was written to it, once it is closed.
func terminal(t *testing.T) (screen *os.File, shown func() []byte) {
	t.Helper()
	side, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Skip("no new terminal can be made: ", err)
	}
	t.Cleanup(func() { _ = side.Close() })
	control := must(side.SyscallConn())(t)
	var number int
	var failed error
	check(t, control.Control(func(fd uintptr) {
		if failed = unix.IoctlSetPointerInt(int(fd), unix.TIOCSPTLCK, 0); failed == nil {
			number, failed = unix.IoctlGetInt(int(fd), unix.TIOCGPTN)
		}
	}))
	check(t, failed)
	if screen, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_WRONLY|unix.O_NOCTTY, 0); err != nil {
		t.Skip("the new terminal cannot be opened: ", err)
	}
	var drawn bytes.Buffer
	var reading sync.WaitGroup
	reading.Go(func() { _, _ = drawn.ReadFrom(side) }) // it ends with an error when the terminal is closed
	return screen, func() []byte {
		reading.Wait()
		return drawn.Bytes()
	}
}
