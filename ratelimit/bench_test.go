package ratelimit_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/holdfast-go/holdfast/ratelimit"
)

func BenchmarkMemory(b *testing.B) {
	for _, keys := range []int{1, 100_000} {
		for _, charges := range []int{1, 2} {
			for _, most := range []int64{1, 1 << 30} {
				b.Run(fmt.Sprint("keys=", keys, " limits=", charges, " max=", most), func(b *testing.B) {
					m, err := ratelimit.NewMemory(ratelimit.MemoryConfig{MaxKeys: 400_000})
					if err != nil {
						b.Fatal(err)
					}
					names := make([]string, keys)
					for i := range names {
						names[i] = fmt.Sprint("user-", i)
					}
					user := ratelimit.Limit{Name: "user", Max: most}
					global := ratelimit.Limit{Name: "global", Max: 1 << 30}
					ctx := context.Background()
					ask := func(i int) {
						var err error
						if charges == 1 {
							_, err = m.Allow(ctx, ratelimit.Charge{Limit: user, Key: names[i%keys]})
						} else {
							_, err = m.Allow(ctx, ratelimit.Charge{Limit: user, Key: names[i%keys]}, ratelimit.Charge{Limit: global})
						}
						if err != nil {
							b.Fatal(err)
						}
					}
					for i := range keys {
						ask(i)
					}
					b.ReportAllocs()
					i := 0
					for b.Loop() {
						i++
						ask(i)
					}
				})
			}
		}
	}
}
