package redistest_test

import (
	"os"
	"testing"

	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func TestNewIsEmptyAndOwn(t *testing.T) {
	t.Parallel()
	for range 3 {
		client := redistest.New(t)
		if n, err := client.DBSize(t.Context()).Result(); err != nil || n != 0 {
			t.Fatalf("the database holds %d keys, %v", n, err)
		}
		if err := client.Set(t.Context(), "same", "key", 0).Err(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestFewDatabases runs on a server with one database for tests: each must get it in turn.
func TestFewDatabases(t *testing.T) {
	server := testenv.Private(t, testenv.Redis, "--databases", "2")
	t.Setenv(testenv.RedisVar, server.URL())
	for range 3 {
		t.Run("", func(t *testing.T) {
			client := redistest.New(t)
			if db := client.Options().DB; db != 1 {
				t.Errorf("database %d, want 1", db)
			}
			if n := client.DBSize(t.Context()).Val(); n != 0 {
				t.Errorf("%d keys of an earlier test", n)
			}
			client.Set(t.Context(), "left", "behind", 0)
		})
	}
}
