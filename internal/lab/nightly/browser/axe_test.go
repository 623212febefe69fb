package browser_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha512"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/chromedp/chromedp"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

const (
	axeURL = "https://registry.npmjs.org/axe-core/-/axe-core-4.10.3.tgz"
	// axeSum is the SHA-512 of it, as the registry has it.
	axeSum = "Xm7bpRXnDSX2YE2YFfBk2FnF0ep6tmG7xPh8iHee8MIcrgq762Nkce856dYtJYLkuIoYZvGfTs/PbZhideTcEg=="
	// maxArchive bounds the download, and the script in it.
	maxArchive = 8 << 20
)

// axeSource returns the script of axe-core, from the cache or the registry of npm.
var axeSource = sync.OnceValues(func() (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		cache = os.TempDir()
	}
	path := filepath.Join(cache, "holdfast", "axe-core-4.10.3.tgz")
	archive, err := os.ReadFile(path)
	if err != nil || !genuine(archive) {
		if archive, err = download(axeURL); err != nil {
			return "", err
		}
		if !genuine(archive) {
			return "", fmt.Errorf("%s has another checksum", axeURL)
		}
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, archive, 0o644)); err != nil {
			return "", err
		}
	}
	return unpack(archive, "package/axe.min.js")
})

func genuine(archive []byte) bool {
	sum := sha512.Sum512(archive)
	return base64.StdEncoding.EncodeToString(sum[:]) == axeSum
}

func download(url string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s", url, resp.Status)
	}
	return io.ReadAll(io.LimitReader(resp.Body, maxArchive))
}

// unpack returns one file of a .tgz.
func unpack(archive []byte, name string) (string, error) {
	plain, err := gzip.NewReader(bytes.NewReader(archive))
	if err != nil {
		return "", err
	}
	for files := tar.NewReader(plain); ; {
		header, err := files.Next()
		if err != nil {
			return "", fmt.Errorf("%s: %w", name, err)
		}
		if header.Name == name {
			text, err := io.ReadAll(io.LimitReader(files, maxArchive))
			return string(text), err
		}
	}
}

// wantAccessible fails for everything that axe-core has against the page as it is.
func (p *tab) wantAccessible(what string) {
	p.t.Helper()
	source, err := axeSource()
	if err != nil {
		testenv.Missing(p.t, "axe-core: "+err.Error())
	}
	// The DevTools put it into the page, whose policy allows no script but its own.
	p.run("axe", chromedp.Evaluate[chromedp.Void](source))
	const check = `axe.run(document).then((r) => r.violations.map((v) =>
		v.id + ", " + v.nodes.length + " times, as in " + v.nodes[0].target + ": " + v.nodes[0].failureSummary))`
	for _, v := range ask(p, "axe", chromedp.Evaluate[[]string](check, chromedp.EvalAwaitPromise)) {
		p.t.Errorf("%s: %s", what, v)
	}
}
