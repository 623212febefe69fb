package migrate

import (
	"fmt"
	"io"
	"io/fs"
	"strings"
	"time"
)

// Export returns the rendered files, for a migration tool of the user's: flat, read only, and safe
// for concurrent use.
func Export(s Set) (fs.FS, error) {
	files, err := s.render()
	if err != nil {
		return nil, fmt.Errorf("migrate %s: %w", s.Component, err)
	}
	return folder(files), nil
}

const root = "."

// folder is files in the order of their names.
type folder []file

func (d folder) Open(name string) (fs.File, error) {
	if name == root {
		return &openFolder{left: d}, nil
	}
	for _, f := range d {
		if f.name == name {
			return openFile{strings.NewReader(f.sql), f}, nil
		}
	}
	return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
}

type openFile struct {
	*strings.Reader
	file file
}

func (f openFile) Stat() (fs.FileInfo, error) { return f.file, nil }
func (f openFile) Close() error               { return nil }

type openFolder struct{ left folder }

func (d *openFolder) Stat() (fs.FileInfo, error) { return file{name: root}, nil }
func (d *openFolder) Close() error               { return nil }
func (d *openFolder) Read([]byte) (int, error)   { return 0, fs.ErrInvalid }

func (d *openFolder) ReadDir(n int) ([]fs.DirEntry, error) {
	if n > 0 && len(d.left) == 0 {
		return nil, io.EOF
	}
	var entries []fs.DirEntry
	for len(d.left) > 0 && (n <= 0 || len(entries) < n) {
		entries = append(entries, fs.FileInfoToDirEntry(d.left[0]))
		d.left = d.left[1:]
	}
	return entries, nil
}

// A file is its own fs.FileInfo.
func (f file) Name() string       { return f.name }
func (f file) Size() int64        { return int64(len(f.sql)) }
func (f file) ModTime() time.Time { return time.Time{} }
func (f file) IsDir() bool        { return f.name == root }
func (f file) Sys() any           { return nil }

func (f file) Mode() fs.FileMode {
	if f.IsDir() {
		return fs.ModeDir | 0o555
	}
	return 0o444
}
