package browser_test

import (
	"context"
	"fmt"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// press presses a key on what a selector finds.
func (p *tab) press(selector, key string) {
	p.t.Helper()
	p.focus(selector)
	p.run("press on "+selector, chromedp.KeyEvent(key))
}

// focus is one step in the page: a live part of it is replaced again and again, and hands the focus on.
func (p *tab) focus(selector string) {
	p.t.Helper()
	p.await(selector+" has the focus", fmt.Sprintf(`((e) => e && (e.focus(), document.activeElement === e))(document.querySelector(%q))`, selector))
}

// follow follows a link or submits a form by keyboard, and waits for the view it leads to.
func (p *tab) follow(selector, heading string) {
	p.t.Helper()
	p.run("mark the view", chromedp.Evaluate[chromedp.Void](`document.body.dataset.left = ""`))
	p.press(selector, kb.Enter)
	arrived := fmt.Sprintf(`document.readyState === "complete" && !("left" in document.body.dataset) && document.querySelector("h1").textContent === %q`, heading)
	testenv.Eventually(p.t, func() error {
		ctx, cancel := context.WithTimeout(p.ctx, testenv.Patience)
		defer cancel()
		there, err := chromedp.Run(ctx, chromedp.Evaluate[bool](arrived))
		if err == nil && !there {
			err = fmt.Errorf("%s does not lead to %q", selector, heading)
		}
		return err // also where there is no document between two views
	})
}

// fill types a text in the place of what a field has.
func (p *tab) fill(selector, text string) {
	p.t.Helper()
	p.focus(selector)
	p.run("fill "+selector, chromedp.Evaluate[chromedp.Void]("document.activeElement.select()"), chromedp.KeyEvent(text))
}

// awaitRows waits until a table has so many rows.
func (p *tab) awaitRows(count int) {
	p.t.Helper()
	p.await(fmt.Sprintf("%d rows", count), fmt.Sprintf(`document.querySelectorAll("tbody tr").length === %d`, count))
}
