package browser_test

import (
	"bytes"
	"image/png"
	"os"
	"path/filepath"
	"testing"

	"github.com/chromedp/chromedp"
)

// maxPicture bounds a picture of the README.
const maxPicture = 150 << 10

// TestPictures takes those of the README, which RECORD=1 renews.
func TestPictures(t *testing.T) {
	t.Parallel()
	dir := t.ArtifactDir()
	if os.Getenv("RECORD") != "" {
		dir = "../../../examples/reservation/docs"
	}
	v := openShop(t)
	v.run("size", chromedp.EmulateViewport(960, 980))
	v.hold("B3")
	v.click(`button[aria-label="Confirm B3"]`)
	v.awaitSeat("B3", "sold, yours")
	v.hold("B4")
	v.click("#duplicates")
	v.awaitText("#effects", "reservations made: 1")
	v.awaitText("#stats", "2 held, 1 confirmed")
	v.turn(`[data-server="rabbitmq"]`)
	v.hold("C5")
	v.awaitText("#count-outbox", "1")
	for _, scheme := range schemes {
		v.scheme(scheme)
		v.run("to the top", chromedp.Evaluate[chromedp.Void]("document.activeElement.blur(), scrollTo(0, 0)"))
		picture := ask(v.tab, "picture", chromedp.CaptureScreenshot())
		config, err := png.DecodeConfig(bytes.NewReader(picture))
		if err != nil || config.Width != 960 || len(picture) > maxPicture {
			t.Errorf("%s: %d wide, %d bytes, %v", scheme, config.Width, len(picture), err)
		}
		if err := os.WriteFile(filepath.Join(dir, "page-"+scheme+".png"), picture, 0o644); err != nil {
			t.Error(err)
		}
	}
}
