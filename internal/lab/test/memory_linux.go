package main

import (
	"os"
	"syscall"
)

const (
	tmpfs  = 0x01021994 // TMPFS_MAGIC of statfs(2)
	noExec = 0x8        // ST_NOEXEC of statfs(2)
	// room is what the servers of the tests are left, in bytes. They take less than half of it.
	room = 4 << 30
)

// inMemory returns the variables that put the temporary files of the tests into dir, if that is in memory and
// can take them: a slow disk, or one that is busy with others, makes servers late. What a killed server has
// written is there after it, as on a disk. The go command's own files stay where they were.
func inMemory(dir string) []string {
	var fs syscall.Statfs_t
	if os.Getenv("TMPDIR") != "" || syscall.Statfs(dir, &fs) != nil {
		return nil
	}
	if fs.Type != tmpfs || fs.Flags&noExec != 0 || int64(fs.Bavail)*int64(fs.Bsize) < room || !sticky(dir) {
		return nil
	}
	env := []string{"TMPDIR=" + dir}
	if os.Getenv("GOTMPDIR") == "" {
		env = append(env, "GOTMPDIR="+os.TempDir())
	}
	return env
}

// sticky reports whether every user may have files in dir, which the servers' users need.
func sticky(dir string) bool {
	info, err := os.Stat(dir)
	return err == nil && info.Mode()&os.ModeSticky != 0 && info.Mode().Perm() == 0o777
}
