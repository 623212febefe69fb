package migrate

import (
	"fmt"
	"io"
	"io/fs"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/internal/sqlident"
)

// Export returns the rendered files, for a migration tool of the user's: flat, read only, and safe
// for concurrent use. Each notes that it was applied, or undone, so that Apply finds done what the tool
// has done.
func Export(s Set) (fs.FS, error) {
	files, err := s.render()
	if err != nil {
		return nil, fmt.Errorf("migrate %s: %w", s.Component, err)
	}
	versions, err := sqlident.Qualify(s.Schema, versionsTable)
	if err != nil {
		return nil, fmt.Errorf("migrate %s: %w", s.Component, err)
	}
	for i := range files {
		files[i].sql += s.note(files[i], versions)
	}
	return folder(files), nil
}

// note is what a file says to Apply.
func (s Set) note(f file, versions string) string {
	key := strings.ReplaceAll(s.key(), "'", "''")
	if f.down {
		return fmt.Sprintf("\nDELETE FROM %s WHERE component = '%s' AND version = %d;\n", versions, key, f.version)
	}
	return fmt.Sprintf("\n-- Migrate finds this file applied.\n%s;\nINSERT INTO %s (component, version) VALUES ('%s', %d) ON CONFLICT DO NOTHING;\n",
		createVersions(versions), versions, key, f.version)
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
