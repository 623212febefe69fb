package main

// show adds what the page needs on real servers. A process of any role tells Redis what goes through it, and one with an
// API shows what all of them have told.
func (p *parts) show(cfg config, b *backend) {
	b.group.Add("flow", p.flow)
	if !cfg.hasAPI() {
		return
	}
	waits := &backlog{outbox: p.messages.Depth, queue: p.broker.consumer.Stats, inHand: p.handled.inHand.Load}
	b.group.Add("backlog", waits)
	b.backlog = waits.Look
	if cfg.trials {
		b.trials = p.trials()
	}
}
