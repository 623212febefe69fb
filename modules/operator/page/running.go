package page

import (
	"github.com/holdfast-go/holdfast/modules/operator/internal/core"
)

// runningView has the processes of the service, and the leases of its outboxes.
type runningView struct {
	core.Running
	Kept     bool // the service keeps a history
	Outboxes []core.OutboxStatus
}

func (p *Page) runningNow(v visit) (runningView, error) {
	running, err := p.o.Running(v.Context())
	shown := runningView{Running: running, Kept: true, Outboxes: p.samples.sample(v.Context()).Outboxes}
	if core.KeepsNone(err) {
		shown.Kept, err = false, nil
	}
	return shown, err
}

func (p *Page) showRunning(v visit) {
	if v.FormValue("live") != "" {
		p.stream(v, core.LiveEvery, func() (string, bool) {
			shown, err := p.runningNow(v)
			if err != nil {
				return p.fragment("running", "silentProcesses", core.TextOf(err)), false
			}
			return p.fragment("running", "processes", shown), false
		})
		return
	}
	shown, err := p.runningNow(v)
	p.render(v, "running", "Running", shown, err)
}
