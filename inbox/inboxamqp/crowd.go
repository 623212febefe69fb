package inboxamqp

// crowds counts the messages of an epoch that wait without a worker.
type crowds struct {
	epoch   int64
	waiting int
}

// crowd counts one more message that waits. When half of the prefetch does, consuming begins
// anew: a new consumer has all of it.
func (s *session) crowd(epoch int64) {
	s.crowdMu.Lock()
	defer s.crowdMu.Unlock()
	if s.crowds.epoch < epoch {
		s.crowds = crowds{epoch: epoch}
	}
	if s.crowds.epoch > epoch {
		return
	}
	s.crowds.waiting++
	if s.crowds.waiting >= (s.r.c.cfg.Prefetch+1)/2 {
		s.requestPause(epoch, errCrowded)
	}
}
