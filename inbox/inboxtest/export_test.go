package inboxtest

// SetMaxBody sets the largest body that is processed, unless n is 0.
func (c *Consumer) SetMaxBody(n int) {
	if n > 0 {
		c.maxBody = n
	}
}
