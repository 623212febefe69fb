//go:build !linux

package main

// inMemory returns no variables: the tests' files stay on the disk.
func inMemory(string) []string { return nil }
