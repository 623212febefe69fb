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

// manyConsumer has enough dead letters for a progress bar. It counts the looks before a change, which only the bar needs.
type manyConsumer struct{ looks *int }

const manyDead = 200

func (c manyConsumer) DeadLetters() inbox.DeadLetters { return manyDeadLetters{looks: c.looks} }

type manyDeadLetters struct {
	inbox.DeadLetters
	looks *int
}

func (l manyDeadLetters) Count(context.Context, inbox.Filter) (int, error) {
	*l.looks++
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

// A terminal gets a progress bar. Another device, as in 2>/dev/null, gets none, and no look for one.
func TestBarIsForTerminals(t *testing.T) {
	t.Parallel()
	null := must(os.OpenFile(os.DevNull, os.O_WRONLY, 0))(t)
	defer func() { _ = null.Close() }()
	if looks := dropMany(t, null); looks != 0 {
		t.Errorf("for a bar on %s dead letters were counted %d times", os.DevNull, looks)
	}
	screen, shown := terminal(t)
	if looks := dropMany(t, screen); looks != 1 {
		t.Errorf("for a bar on a terminal dead letters were counted %d times", looks)
	}
	check(t, screen.Close())
	if drawn := shown(); !bytes.Contains(drawn, fmt.Appendf(nil, "/%d", manyDead)) {
		t.Errorf("the terminal shows %q", drawn)
	}
}

// dropMany drops all dead letters with errs as its error output. It returns how often they were counted before.
func dropMany(t *testing.T, errs *os.File) (looks int) {
	t.Helper()
	service := operator.Config{Consumers: []operator.Consumer{{Name: "many", Consumer: manyConsumer{&looks}}}}
	var out bytes.Buffer
	if code := command.Run(t.Context(), service, []string{"drop", "--all", "--by=ada"}, &out, errs); code != 0 {
		t.Errorf("it exits with %d: %s", code, &out)
	}
	return looks
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
