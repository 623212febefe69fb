package browser_test

import (
	"bytes"
	"image/png"
	"os"
	"path/filepath"
	"testing"

	"github.com/chromedp/chromedp"
)

// maxPicture bounds a picture of a README.
const maxPicture = 150 << 10

// TestPictures takes the picture of the shop's README, which RECORD=1 renews.
func TestPictures(t *testing.T) {
	t.Parallel()
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
	v.picture("reservation", "page")
}

// TestOperatorPictures takes those of the operator's README and of the guide to dead letters.
func TestOperatorPictures(t *testing.T) {
	t.Parallel()
	v := openShop(t)
	v.hold("B3")
	v.poison(3)
	v.awaitText("#stats", "1 held")
	v.operate()
	v.run("size", chromedp.EmulateViewport(960, 900))
	v.awaitText("#live", "validation 3")
	v.await("rates", `!document.getElementById("live").textContent.includes("–")`)
	v.picture("operator", "page")
	v.follow(`#live a[href*="class=validation"]`, "Dead letters by kind")
	v.follow(`.cards a[href^="letters?"]`, "Dead letters")
	v.follow("tbody a", "One dead letter")
	v.follow(`a[href*="body=1"]`, "One dead letter")
	v.awaitText("pre", `"reservation_id": "poison"`)
	v.picture("operator", "letter")
}

// picture takes what is shown, light and dark, for the folder docs of an example.
func (v *visit) picture(example, name string) {
	v.t.Helper()
	dir := v.t.ArtifactDir()
	if os.Getenv("RECORD") != "" {
		dir = filepath.Join("../../../../examples", example, "docs")
	}
	for _, scheme := range schemes {
		v.scheme(scheme)
		v.run("to the top", chromedp.Evaluate[chromedp.Void]("document.activeElement.blur(), scrollTo(0, 0)"))
		picture := ask(v.tab, "picture", chromedp.CaptureScreenshot())
		config, err := png.DecodeConfig(bytes.NewReader(picture))
		if err != nil || config.Width != 960 || len(picture) > maxPicture {
			v.t.Errorf("%s, %s: %d wide, %d bytes, %v", name, scheme, config.Width, len(picture), err)
		}
		if err := os.WriteFile(filepath.Join(dir, name+"-"+scheme+".png"), picture, 0o644); err != nil {
			v.t.Error(err)
		}
	}
}
